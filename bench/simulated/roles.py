"""The `--roles` half of `bench fleet`: prefill and decode on separate workers, or on the same.

It compares mixed workers, fixed splits and adaptive roles on the same requests. Rates are shares of the rate
that one worker under `vllm` sustains, for each worker.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median
from typing import Any

import numpy as np
import uvloop

from bench.kit.context import Context
from bench.kit.datasets import find
from bench.kit.load import LoadResult, first_error, full_answer, serve_all
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table, joined
from bench.kit.stacks import Stack, on_bus, start_stack
from bench.kit.stats import percentile
from bench.simulated.ecoserve.measures import peer_knee
from services.placement.core.roles import BOTH, FleetRoles, Role
from services.worker.core.costs import find_cost
from shared import subjects
from shared.bus import Handler, Listener
from shared.errors import InternalError
from shared.messages.moves import SequenceMoved
from shared.messages.plans import WorkerStepped
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


def run(context: Context) -> Outcome:
    """Run the bench: simulated, live, or both. Raises InternalError if a stack does not serve."""
    live = context.arguments.live
    parts = [] if live == "only" else [_simulated(context)]
    return joined([*parts, *([_live(context)] if live else [])])


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
        reference, knee = peer_knee(source, find_machine(source), 200 if context.quick else 500)
        for count in counts:
            sides: list[int | None] = [0, *sorted({count // 4, count // 2, 3 * count // 4}), None]
            for load in LOADS[-1:] if context.quick else LOADS:
                rate = load * knee * count
                runs += [
                    Roles(source, count, decoders, load, rate, reference.level, duration_s, seed)
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


ROUNDS = 3
"""Rounds in which the live sides take turns."""
_SPLITS = {2: "prefill,decode", 4: "prefill,prefill,decode,decode"}
"""`placement.roles` by number of workers."""
_PROMPT, _ANSWER, _EVERY_S = (400, 2000), (30, 60), 0.6
"""Requests come so far apart that none waits for another's prefill."""
_LIVE_SHOWN = {
    "first token p50 s, both": "ttft_p50_s_both",
    "split": "ttft_p50_s_split",
    "later p50 s": "first_later_s_p50",
    "p90": "first_later_s_p90",
    "step s": "step_s",
    "hand-overs": "hand_overs",
    "copied after the prompt": "late_share",
    "taking s": "late_s_p50",
}
_HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.SCHEDULER_MOVED, SequenceMoved, "on_moved"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
)


@dataclass
class _Watch:
    """Collects finished hand-overs, and the durations of decode-only steps."""

    moves: list[SequenceMoved] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)

    def on_moved(self, moved: SequenceMoved) -> None:
        if not moved.reason:
            self.moves.append(moved)

    def on_stepped(self, event: WorkerStepped) -> None:
        if event.decoded_tokens and not event.prefilled_tokens and event.step_s:
            self.steps_s.append(event.step_s)


def _live(context: Context) -> Outcome:
    figures: dict[str, float] = {}
    rows = []
    for workers in (2,) if context.quick else tuple(_SPLITS):
        context.say(f"first tokens, {workers} live workers")
        dice, ids = context.random(f"times {workers}"), vocabulary(TINY_CHAT)
        bodies = [_timed_body(dice, ids) for _ in range(4 if context.quick else 20)]
        with ExitStack() as running:
            stacks = {
                side: running.enter_context(
                    start_stack(
                        context.run_dir / f"{side}-{workers}",
                        {"worker.engine": "simulated", "worker.kv_blocks": 960, "placement.roles": roles},
                        workers=workers,
                        name=side,
                    )
                )
                for side, roles in (("both", BOTH), ("split", _SPLITS[workers]))
            }
            found = uvloop.run(_in_turns(stacks, bodies))
        rows.append((workers, *(f"{found[name]:.3g}" for name in _LIVE_SHOWN.values())))
        figures |= {f"live_{name}_w{workers}": found[name] for name in ("first_later_s_p50", "late_share")}
        figures[f"live_first_later_steps_w{workers}"] = found["first_later_s_p50"] / found["step_s"]
    title = "engine `simulated`, prompts that do not wait for each other"
    return Outcome(figures, 0, [Table(title, ("workers", *_LIVE_SHOWN), rows)])


def _timed_body(dice: Random, ids: int) -> dict[str, Any]:
    return full_answer(drawn_tokens(dice, ids, dice.randint(*_PROMPT)), dice.randint(*_ANSWER))


async def _in_turns(stacks: dict[str, Stack], bodies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Measure times to the first token; every round has a new cache salt, so that no prefix is cached."""
    first_s: dict[str, list[float]] = {side: [] for side in stacks}
    watch, due_s = _Watch(), [_EVERY_S * at for at in range(len(bodies))]
    async with on_bus(stacks["split"].run_dir, "placement-0", _HANDLERS, watch):
        for number in range(ROUNDS):
            salted = [{**body, "cache_salt": f"round {number}"} for body in bodies]
            for side, stack in stacks.items():
                load: LoadResult = await serve_all(stack.target, salted, len(salted), due_s=due_s)
                if error := first_error(load.answers):
                    raise InternalError(f"the stack {side!r} does not serve: {error}")
                first_s[side] += [answer.first_s for answer in load.answers]
    later_s = [one - other for one, other in zip(first_s["split"], first_s["both"], strict=True)]
    moved = sum(one.moved_bytes for one in watch.moves)
    return {
        **{f"ttft_p50_s_{side}": percentile(times, 50) for side, times in first_s.items()},
        "first_later_s_p50": median(later_s),
        "first_later_s_p90": percentile(later_s, 90),
        "step_s": median(watch.steps_s),
        "hand_overs": float(len(watch.moves)),
        "late_share": sum(one.late_bytes for one in watch.moves) / max(1, moved),
        "late_s_p50": median(one.late_s for one in watch.moves) if watch.moves else 0.0,
    }
