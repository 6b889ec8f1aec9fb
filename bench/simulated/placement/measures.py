"""Figures of replays: ratios of MELL to its rivals, by workload and overall."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.kit.stats import geometric_mean
from bench.simulated.placement.replay import (
    BALANCE,
    BALANCE_LAZY,
    BEST_FIT,
    BEST_FIT_RESERVE,
    EAGER_BY_OPERATION,
    EAGER_SIDE,
    MELL,
    MELL_BY_OPERATION,
    WORST_FIT,
    WORST_FIT_RESERVE,
    PackingSide,
    Tally,
)


@dataclass
class PackingCell:
    """One workload on one kind of GPU, with every side's replay."""

    name: str
    label: str
    jobs: int
    left_out: int
    tallies: dict[str, Tally] = field(default_factory=dict)


RIVALS = {
    "gpus_vs_bf": BEST_FIT,
    "gpus_vs_wf": WORST_FIT,
    "gpus_vs_lb": BALANCE,
    "gpus_vs_lb_lazy": BALANCE_LAZY,
    "gpus_vs_bf_reserve": BEST_FIT_RESERVE,
    "gpus_vs_wf_reserve": WORST_FIT_RESERVE,
}


def figures_of(cells: Sequence[PackingCell]) -> dict[str, float]:
    """Return geometric means over cells by name, and each cell's own as `name_cell`."""
    by_cell = {cell.name: _cell_figures(cell.tallies) for cell in cells}
    names = {name for found in by_cell.values() for name in found}
    figures = {
        name: geometric_mean(found[name] for found in by_cell.values() if name in found)
        for name in sorted(names)
    }
    for cell, found in by_cell.items():
        figures |= {f"{name}_{cell}": value for name, value in found.items()}
    shares = [found["utilization"] for found in by_cell.values()]
    figures["utilization_least"] = min(shares)
    figures["worst_ratio"] = max(
        cell.tallies[side.label].worst_ratio
        for cell in cells
        for side in (MELL, MELL_BY_OPERATION, EAGER_SIDE, EAGER_BY_OPERATION)
        if side.label in cell.tallies
    )
    single = [
        cell.tallies[side.label]
        for cell in cells
        for side in (MELL_BY_OPERATION, EAGER_BY_OPERATION)
        if side.label in cell.tallies
    ]
    figures["moves_max"] = float(max((tally.moves_max for tally in single), default=0))
    figures["requests_moved_max"] = float(max((tally.requests_max for tally in single), default=0))
    return figures


def _cell_figures(tallies: Mapping[str, Tally]) -> dict[str, float]:
    mell = tallies[MELL.label]
    found = {
        "gpus_vs_ideal": mell.gpu_epochs / mell.least_gpus,
        "gpus_vs_volume": mell.gpu_epochs / mell.volume,
        "utilization": mell.used_share / mell.epochs,
        "mean_gpus": mell.mean_gpus(),
    }
    for name, side in RIVALS.items():
        if side.label in tallies:
            found[name] = mell.gpu_epochs / tallies[side.label].gpu_epochs
    moves = {
        "migrations_vs_lb": (MELL, BALANCE),
        "migrations_vs_lb_lazy": (MELL, BALANCE_LAZY),
        "migrations_vs_bf_recomputes": (MELL, BEST_FIT),
        "batching_moves": (MELL, MELL_BY_OPERATION),
        "batching_moves_eager": (EAGER_SIDE, EAGER_BY_OPERATION),
    }
    for name, (ours, theirs) in moves.items():
        ratio = _moves_ratio(tallies, ours, theirs)
        if ratio is not None:
            found[name] = ratio
    return found


def _moves_ratio(tallies: Mapping[str, Tally], ours: PackingSide, theirs: PackingSide) -> float | None:
    if ours.label not in tallies or theirs.label not in tallies:
        return None
    above, below = tallies[ours.label].moves, tallies[theirs.label].moves
    return above / below if above and below else None


def rows_of(cell: PackingCell) -> list[tuple[object, ...]]:
    """Return a table row per side."""
    rows: list[tuple[object, ...]] = []
    for label, one in cell.tallies.items():
        per_s = [n / one.seconds for n in (one.moves - one.recomputes, one.item_moves, one.recomputes)]
        sizes = (one.mean_gpus(), one.peak_gpus, one.gpu_epochs / one.least_gpus, one.used_share / one.epochs)
        rows.append((label, *sizes, *per_s, one.waits))
    return rows


COLUMNS = ("side", "GPUs", "peak", "/bound", "in use", "moves/s", "bundles once", "recomputes/s", "failed")
