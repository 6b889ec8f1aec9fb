"""The `--roles` half of `bench fleet`: prefill and decode on separate workers, or on the same.

It compares mixed workers, fixed splits and adaptive roles on the same requests. Rates are shares of the rate
that one worker under `vllm` sustains, for each worker. KV moves over links of 25 GB/s, starting with the
first prefill chunk. The first `WARM_S` of a run are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from bench.kit.context import Context
from bench.kit.datasets import find
from bench.kit.outcome import Outcome, Table, joined
from bench.simulated import roles_live
from bench.simulated.ecoserve.measures import KneeQuestion, answer_knee, measure_reference
from services.placement.core.roles import FleetRoles, Role
from services.worker.core.costs import find_cost
from sim.case import Case, Machine
from sim.meters import gap_quantile_s
from sim.predictors import find_predictor
from sim.routers import find_router
from sim.setup import Setup
from sim.simulation import Simulation
from sim.summary import ServiceLevel, attainment
from sim.sweep import sweep
from sim.workloads import WORKLOADS, Source, poisson_requests, training_requests

LONG_PROMPTS = ("azure_code", "arxiv")
TRACES = (*LONG_PROMPTS, "azure", "mooncake")
LOADS = (0.4, 0.8, 1.2)
LONG_LOAD = 1.2
"""Load at which SLO attainment is compared."""
_CALM_LOAD = 0.8
WARM_S = 20.0
LEAST_REQUESTS = 40
"""Least requests per worker."""
_MACHINES = {"mooncake": Machine(capacity_blocks=5120)}
_MACHINE = Machine(capacity_blocks=1750)
"""OPT-13B's weights and 47 GB of KV on a GPU with 80 GB."""
_LEAST_LEVEL = 0.05
"""Attainment is compared from here up; below, nothing is served in time."""

Cell = tuple[str, int, float]
"""(trace, workers, load)"""


@dataclass(frozen=True, slots=True)
class Roles:
    """One run. `decoders` is the number of decode-only workers; None is adaptive."""

    source: Source
    workers: int
    decoders: int | None
    load: float
    rate: float
    level: ServiceLevel
    duration_s: float
    seed: int

    @property
    def side(self) -> str:
        if self.decoders is None:
            return "adaptive"
        return f"{self.workers - self.decoders}+{self.decoders}" if self.decoders else "both"

    @property
    def cell(self) -> Cell:
        return (self.source.name, self.workers, self.load)


def find_machine(source: Source) -> Machine:
    return _MACHINES.get(source.name, _MACHINE)


def _roles(run: Roles) -> FleetRoles | None:
    if run.decoders is None:
        return FleetRoles(None)
    prefillers = run.workers - run.decoders
    fixed = (Role.PREFILL,) * prefillers + (Role.DECODE,) * run.decoders
    return FleetRoles(fixed) if run.decoders else None


def serve(run: Roles) -> dict[str, float]:
    """Run one simulation and return its figures."""
    machine = find_machine(run.source)
    train = training_requests(run.source, count=3000, seed=run.seed)
    roles = _roles(run)
    setup = Setup(
        policy="kvasir",
        shape=machine.shape,
        settings=Case(run.source, machine=machine).settings,
        cost=find_cost(machine.cost),
        predictor=find_predictor("histogram", seed=run.seed, train=train),
        workers=run.workers,
        router=find_router("prefix_aware"),
        roles=roles,
        warm_s=WARM_S,
    )
    count = max(LEAST_REQUESTS * run.workers, round(run.rate * (WARM_S + run.duration_s)))
    requests = poisson_requests(run.source, count=count, rate_per_s=run.rate, seed=run.seed)
    outcome = Simulation(setup, requests).run()
    records = [record for record in outcome.records if record.request.arrival_s >= WARM_S]
    ttft_s = [record.first_token_s - record.request.arrival_s for record in records]
    return {
        "slo": attainment(records, run.level),
        "tbt_p99_s": gap_quantile_s(outcome.meters, 0.99),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "latency_s": fmean(record.jct_s for record in records),
        "handed_over": fmean(record.handovers > 0 for record in records),
        "changes": float(roles.changes if roles is not None else 0),
    }


_SHOWN = {
    "SLO": "slo",
    "between tokens p99 s": "tbt_p99_s",
    "first token p50 s": "ttft_p50_s",
    "p99": "ttft_p99_s",
    "mean latency s": "latency_s",
    "handed over": "handed_over",
    "changes": "changes",
}


def _knee(source: Source, requests: int) -> tuple[float, ServiceLevel]:
    """Return the rate that one worker sustains under `vllm`, and the service level at low load."""
    case = Case(source, "vllm", "none", requests=requests, machine=find_machine(source))
    reference = measure_reference(case)
    question = KneeQuestion(source.name, case, reference.limit_s, reference.capacity_per_s, (0,))
    return answer_knee(question), reference.level


def run(context: Context) -> Outcome:
    """Run the bench: simulated, live, or both."""
    live = context.arguments.live
    parts = [] if live == "only" else [_simulated(context)]
    return joined([*parts, *([roles_live.run(context)] if live else [])])


def _simulated(context: Context) -> Outcome:
    """Run the simulated sides. Without data, lengths come from fitted distributions."""
    flags = context.arguments
    names = LONG_PROMPTS[:1] if context.quick else TRACES
    counts = flags.workers or ([4] if context.quick else [4, 8, 16])
    duration_s = flags.duration or (40.0 if context.quick else 120.0)
    seeds = range(context.seed, context.seed + (flags.seeds or (1 if context.quick else 3)))
    runs: list[Roles] = []
    for name in names:
        source = Source(name, find(WORKLOADS[name].file))
        context.say(f"what one worker sustains under vllm: {name}")
        knee, level = _knee(source, 200 if context.quick else 500)
        for count in counts:
            sides: list[int | None] = [0, *sorted({count // 4, count // 2, 3 * count // 4}), None]
            for load in LOADS[-1:] if context.quick else LOADS:
                rate = load * knee * count
                runs += [
                    Roles(source, count, decoders, load, rate, level, duration_s, seed)
                    for decoders in sides
                    for seed in seeds
                ]
    with context.progress("roles", len(runs)) as bar:
        answers = sweep(
            serve, runs, processes=flags.processes, on_result=lambda done, _: bar.advance(now=done.side)
        )
    rows: list[Sequence[object]] = []
    found: dict[Cell, dict[str, dict[str, float]]] = {}
    of_seeds = [answers[at : at + len(seeds)] for at in range(0, len(answers), len(seeds))]
    for one, each in zip(runs[:: len(seeds)], of_seeds, strict=True):
        answer = {key: fmean(run[key] for run in each) for key in each[0]}
        found.setdefault(one.cell, {})[one.side] = answer
        rows.append((*one.cell, one.side, *(f"{answer[key]:.3g}" for key in _SHOWN.values())))
        context.record(
            {"trace": one.source.name, "workers": one.workers, "load": one.load, "side": one.side, **answer},
            "roles.jsonl",
        )
    table = Table("roles (simulated)", ("trace", "workers", "load", "roles", *_SHOWN), rows)
    notes = [
        f"policy kvasir, histogram; {duration_s:g} s of arrivals after {WARM_S:g} s, or longer; "
        f"means of seeds {list(seeds)}"
    ]
    return Outcome(_figures(found), 0, [table], notes, simulated=True)


def _figures(found: dict[Cell, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return ratios of adaptive to `both`: the mean for long prompts under high load, and the worst of all
    cells."""
    long = [cell for cell in found if cell[0] in LONG_PROMPTS and cell[2] == LONG_LOAD]

    def ratio(cell: Cell, name: str, side: str = "adaptive") -> float:
        ours, theirs = found[cell][side][name], found[cell]["both"][name]
        if name == "slo":
            ours, theirs = max(ours, _LEAST_LEVEL), max(theirs, _LEAST_LEVEL)
        return ours / max(theirs, 1e-9)

    figures = {
        "roles_slo_ratio": fmean(ratio(cell, "slo") for cell in long),
        "roles_tbt_p99_ratio": fmean(ratio(cell, "tbt_p99_s") for cell in long),
        "roles_never_below": min(ratio(cell, "slo") for cell in found),
        "roles_worst_fixed": min(
            ratio(cell, "slo", side) for cell in found for side in found[cell] if side != "adaptive"
        ),
    }
    calm = [cell for cell in found if cell[0] in LONG_PROMPTS and cell[2] == _CALM_LOAD]
    if calm:
        figures["roles_slo_ratio_at_0.8"] = fmean(ratio(cell, "slo") for cell in calm)
        figures["roles_tbt_p99_ratio_at_0.8"] = fmean(ratio(cell, "tbt_p99_s") for cell in calm)
    for name, workers, load in long:
        for figure in ("slo", "tbt_p99"):
            key = "slo" if figure == "slo" else "tbt_p99_s"
            figures[f"roles_{figure}_ratio_{name}_w{workers}"] = ratio((name, workers, load), key)
    return figures
