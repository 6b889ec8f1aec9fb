"""`python -m bench placement`: number of GPUs, memory use, migrations and speed of placement.

Simulated, papers/000 §VIII: long conversations on LLaMA-13B (A100-40G) and LLaMA-7B (24 GB), MELL against
best fit, worst fit and load balancing.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from bench.kit.context import Context, Progressing
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table
from bench.kit.stats import exponent
from bench.simulated.placement import replay
from bench.simulated.placement.jobs import A100, RTX4090, Hardware, Workload, make_jobs
from bench.simulated.placement.measures import COLUMNS, PackingCell, figures_of, rows_of
from bench.simulated.placement.replay import MELL, SIDES
from bench.simulated.placement.speed import Churn, Speed
from shared.errors import ConfigError
from sim.workloads import Source

RATES = (0.5, 0.8, 1.1)
WARM_UP_S = 300.0
QUICK_AZURE_S = 400.0
HEADLINE = (
    "gpus_vs_ideal", "gpus_vs_bf", "gpus_vs_wf", "gpus_vs_lb", "utilization", "utilization_least",
    "migrations_vs_lb", "migrations_vs_lb_lazy", "migrations_vs_bf_recomputes", "batching_moves",
    "batching_moves_eager", "worst_ratio", "moves_max", "ops_per_s", "ops_growth", "served_gain_1",
    "served_gain_1.2", "served_gain_1.5",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="PATH", help="lengths of conversations from this file")
    parser.add_argument("--duration", type=float, help="of arrivals, in s [900, quick: 600]")
    parser.add_argument("--gpus", type=int, nargs="+", help="for ops_per_s [100 1000 10000, quick: 100 1000]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unreadable trace or invalid numbers."""
    flags = context.arguments
    duration_s = flags.duration or (600.0 if context.quick else 900.0)
    if duration_s <= WARM_UP_S or min(flags.gpus or [1]) < 1:
        raise ConfigError(f"--duration must exceed {WARM_UP_S:.0f} s, --gpus be at least 1", param="duration")
    source = Source(path=flags.trace) if flags.trace else None
    data = None if context.quick else data_folder()
    cells = _replay(context, duration_s, data, source)
    figures = figures_of(cells)
    served = _serving(context, data, source)
    figures |= replay.figures(served)
    speeds = _speeds(
        context, flags.gpus or ([100, 1000] if context.quick else [100, 1000, 10_000]), data, source
    )
    figures |= _speed_figures(speeds)
    failures = sum(tally.waits for cell in cells for tally in cell.tallies.values())
    tables = [*(_table(cell) for cell in cells), _served_table(served), _speed_table(speeds)]
    notes = _notes(cells, data, source)
    return Outcome(figures, failures, tables, notes, simulated=True, headline=HEADLINE)


def _replay(
    context: Context, duration_s: float, data: Path | None, source: Source | None
) -> list[PackingCell]:
    hardware = (A100,) if context.quick else (A100, RTX4090)
    rates = RATES[::2] if context.quick else RATES
    workloads = [Workload(f"poisson_{rate}", f"λ = {rate}", rate, duration_s) for rate in rates]
    workloads.append(Workload("azure", "azure", None, QUICK_AZURE_S if context.quick else duration_s))
    with context.progress("replaying", len(hardware) * len(workloads) * len(SIDES)) as bar:
        return [
            _cell(context, workload, machine, data, source, bar)
            for machine in hardware
            for workload in workloads
        ]


def _cell(
    context: Context,
    workload: Workload,
    machine: Hardware,
    data: Path | None,
    source: Source | None,
    bar: Progressing,
) -> PackingCell:
    jobs, left_out = make_jobs(workload, machine, data=data, source=source, seed=context.seed)
    cell = PackingCell(
        f"{workload.name}_{machine.name}", f"{workload.label}\n{machine.label}", len(jobs), left_out
    )
    for side in SIDES:
        tally = side.run(jobs, machine, WARM_UP_S)
        cell.tallies[side.label] = tally
        context.record(
            {"cell": cell.name, "side": side.label, "mean_gpus": tally.mean_gpus(), "moves": tally.moves}
        )
        bar.advance(1, f"{cell.name} {side.label}")
    return cell


def _serving(context: Context, data: Path | None, source: Source | None) -> list[replay.ServedShare]:
    """Measure serving on as many GPUs as the load needs by volume, and on fewer."""
    workload = Workload("poisson_0.8", "λ = 0.8", 0.8, 400.0 if context.quick else 900.0)
    jobs, _ = make_jobs(workload, A100, data=data, source=source, seed=context.seed)
    tally = MELL.run(jobs, A100, WARM_UP_S)
    with context.progress("serving ratio", 1) as bar:
        found = replay.measure(jobs, A100, tally.volume / tally.epochs)
        bar.advance()
    return found


def _served_table(found: Sequence[replay.ServedShare]) -> Table:
    rows = [
        (f"{one.load:g}", one.gpus, one.policy, f"{one.served} of {one.requests}", f"{one.ratio:.3f}")
        for one in found
    ]
    title = "requests that keep their KV on a fixed number of GPUs, λ = 0.8 (simulated)"
    return Table(title, ("load", "GPUs", "policy", "served", "ratio"), rows)


def _speeds(context: Context, gpus: Sequence[int], data: Path | None, source: Source | None) -> list[Speed]:
    workload = Workload("churn", "churn", 5.0, 600.0)
    jobs, _ = make_jobs(workload, A100, data=data, source=source, seed=context.seed)
    operations = 2000 if context.quick else 10_000
    with context.progress("operations", len(gpus)) as bar:
        found = []
        for count in gpus:
            found.append(Churn(A100, jobs, count, context.seed).run(operations))
            bar.advance(1, f"{count} GPUs")
    return found


def _speed_figures(speeds: Sequence[Speed]) -> dict[str, float]:
    figures = {f"ops_per_s_{speed.asked}": speed.ops_per_s for speed in speeds}
    figures["ops_per_s"] = min(speeds, key=lambda speed: abs(speed.asked - 1000)).ops_per_s
    if len(speeds) > 1:
        figures["ops_growth"] = exponent({speed.asked: 1 / speed.ops_per_s for speed in speeds})
    return figures


def _table(cell: PackingCell) -> Table:
    title = f"{cell.label} (simulated): {cell.jobs} conversations".replace("\n", ", ")
    return Table(title, COLUMNS, rows_of(cell))


def _speed_table(speeds: Sequence[Speed]) -> Table:
    rows = [(s.asked, s.gpus, s.requests, s.operations, f"{s.ops_per_s:.0f}") for s in speeds]
    columns = ("load, GPUs", "active", "requests", "operations", "per CPU second")
    return Table("operations of mell, the mix of the conversations above (simulated load)", columns, rows)


def _notes(cells: Sequence[PackingCell], data: Path | None, source: Source | None) -> list[str]:
    left_out, replayed = sum(cell.left_out for cell in cells), sum(cell.jobs for cell in cells)
    notes = [
        "bound: ceil(blocks in use / blocks of a GPU), at every second; failed: no GPU left to activate",
        "load_balance pairs all workers every second; lazy: those with little free memory per request",
        "reserve: greatest length at arrival, so no recomputes; in use counts what is filled",
        f"{left_out} conversations of {left_out + replayed} fit no GPU and are left out",
        "operations: arrivals, ends, growths that change the class or move something; of those, CPU time",
    ]
    if data is None and source is None:
        notes.append("lengths generated from ShareGPT's quantiles, azure's arrivals from gamma gaps")
    return notes
