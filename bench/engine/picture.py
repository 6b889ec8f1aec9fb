"""The engine bench as a picture: ours / theirs over the batch size, a line per context."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.drawing import Figure, picture
from bench.engine.workload import Cell


@picture
def draw(file: Path, figures: Mapping[str, float], workload: Sequence[Cell], peer: str) -> None:
    """Writes a PNG; the thin line reaches down to the worst alternation."""
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    for context in sorted({cell.context for cell in workload}):
        names = {
            cell.batch: f"tok_s_ratio_{cell.name}"
            for cell in workload
            if cell.context == context and f"tok_s_ratio_{cell.name}" in figures
        }
        if not names:
            continue
        medians = [figures[name] for name in names.values()]
        below = [figures[name] - figures[f"{name}_worst"] for name in names.values()]
        axes.errorbar(
            list(names), medians, yerr=[below, [0.0] * len(below)], marker="o", label=f"context {context}"
        )
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(f"tokens/s, kvasir / {peer}")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
