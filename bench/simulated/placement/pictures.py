"""Figures 11–15 of papers/000 with our numbers: PNGs, no display."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.kit.plots import Figure, picture
from bench.simulated.placement.measures import PackingCell
from bench.simulated.placement.replay import Tally

Value = Callable[[Tally], float]


@picture
def draw_bars(
    path: Path, title: str, unit: str, cells: Sequence[PackingCell], labels: Sequence[str], value: Value
) -> None:
    """One group per cell, one bar per side."""
    figure = Figure(figsize=(1.2 + 1.5 * len(cells), 4))
    axes = figure.add_subplot()
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        places = [place + index * width for place in range(len(cells))]
        axes.bar(places, [value(cell.tallies[label]) for cell in cells], width, label=label)
    axes.set_xticks([place + 0.4 for place in range(len(cells))], [cell.label for cell in cells])
    axes.set_ylabel(unit)
    axes.set_title(f"{title} (simulated)")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, bbox_inches="tight")


@picture
def draw_timeline(path: Path, cell: PackingCell, labels: Sequence[str]) -> None:
    """GPUs over time."""
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    for label in labels:
        timeline = cell.tallies[label].timeline
        axes.plot([at for at, _ in timeline], [gpus for _, gpus in timeline], label=label, linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GPUs")
    axes.set_title(f"GPUs over time, {cell.label} (simulated)")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110, bbox_inches="tight")
