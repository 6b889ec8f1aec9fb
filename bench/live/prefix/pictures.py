"""Pictures of `python -m bench prefix`. PNG, no display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit.plots import Figure, picture

_MARKS = "os^vDP*X<>hd"


@picture
def draw_rates(
    path: Path, title: str, rows: Sequence[tuple[int, Mapping[str, float]]], infinite: float
) -> None:
    """One line per order: (blocks, hit rate); what an infinite cache finds dashed."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for index, policy in enumerate(rows[0][1]):
        sizes, rates = [size for size, _ in rows], [found[policy] for _, found in rows]
        axes.plot(sizes, rates, label=policy, marker=_MARKS[index % len(_MARKS)], markersize=4)
    axes.axhline(infinite, linestyle="--", color="grey", linewidth=1)
    axes.set(title=title, xlabel="cache, blocks", ylabel="share of blocks found (simulated)")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png")


@picture
def draw_throughput(path: Path, title: str, rows: Mapping[str, float], paper: float) -> None:
    """One bar per cell: throughput over that without a cache; the paper's factor dashed."""
    figure = Figure(figsize=(7, 0.32 * len(rows) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(rows), list(rows.values()), color="#4878a8")
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.axvline(paper, linestyle="--", color="grey", linewidth=1, label="the paper's")
    axes.invert_yaxis()
    axes.set(title=title, xlabel="throughput / throughput without a prefix cache")
    axes.legend(fontsize="small")
    figure.savefig(path, format="png")
