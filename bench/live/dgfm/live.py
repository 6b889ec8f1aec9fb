"""Four real workers that borrow from each other under constant load, one side after the other.

Throughput comes from step reports, the remote share from heartbeats. A step is remote if the worker's last
heartbeat had borrowed blocks in use. All sides get the same requests in the same order.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Protocol

from bench.kit.load import Answer, Target, complete, full_answer
from bench.kit.plots import Chart, draw_lines
from bench.kit.stacks import PLAIN, Stack, on_bus, start_stack
from services.stack.access import BusAccess
from services.stack.roll_call import RollCall
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.bus import Handler, Listener
from shared.errors import InternalError
from shared.messages.commands import WantKv
from shared.messages.plans import WorkerStepped
from shared.messages.reports import WorkerReported


@dataclass(frozen=True)
class Step:
    """A report of some steps of one worker."""

    at_s: float
    is_remote: bool
    steps: int
    step_s: float
    """Duration of the last step."""


@dataclass(frozen=True)
class LiveRun:
    """Result of one side, in seconds since the start of its load."""

    duration_s: float
    decoded: list[tuple[float, int]]
    """(time, tokens)"""
    shares: list[tuple[float, int, int]]
    """(time, remote blocks in use, blocks in use) over all workers."""
    finished: int
    errors: list[str]
    counts: Mapping[str, int]
    """Settlements, and blocks returned by settlement or recall."""
    steps: Sequence[Step] = ()

    def tok_s(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Return tokens per second in a part of the run."""
        end_s = min(end_s, self.duration_s)
        return sum(n for at_s, n in self.decoded if first_s <= at_s < end_s) / (end_s - first_s)

    def remote_share(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Return the share of KV in use that is remote, in a part of the run."""
        part = [(remote, used) for at_s, remote, used in self.shares if first_s <= at_s < end_s]
        return sum(remote for remote, _ in part) / max(1, sum(used for _, used in part))

    def step_s(self, first_s: float = 0.0, *, is_remote: bool) -> float:
        """Return the mean duration of local or remote steps; 0 if there are none."""
        kind = [one for one in self.steps if one.at_s >= first_s and one.is_remote is is_remote]
        return sum(one.step_s * one.steps for one in kind) / max(1, sum(one.steps for one in kind))

    def remote_steps(self, first_s: float = 0.0) -> float:
        """Return the share of steps that are remote."""
        part = [one for one in self.steps if one.at_s >= first_s]
        return sum(one.steps for one in part if one.is_remote) / max(1, sum(one.steps for one in part))


WORKERS, KV_BLOCKS, BLOCK_TOKENS = 4, 96, 16
_PROMPT_TOKENS, _DOCUMENT_TOKENS = (30, 160), (500, 1400)
_ANSWER_TOKENS = (40, 360)
LONGEST_TOKENS = _DOCUMENT_TOKENS[1] + _ANSWER_TOKENS[1]
"""Longest prompt plus answer."""


@dataclass(frozen=True)
class Load:
    """Requests of the clients, and initial debts of the workers."""

    clients: int
    documents: float = 0.0
    """Share of requests with a long prompt."""
    wanted_blocks: int = 0
    """Each worker is told, as by a scheduler, that it needs this many blocks more than it has. So workers
    borrow in circles."""
    wanted_s: float = 0.0
    """Seconds for which workers are told so."""


LOADS: Mapping[str, Load] = {
    "circle": Load(clients=40, wanted_blocks=24, wanted_s=4.0),
    "light": Load(clients=18, documents=0.04, wanted_blocks=24, wanted_s=3.0),
    "mixed": Load(clients=28, documents=0.06),
}


def bodies(random: Random, vocabulary: int, documents: float) -> Iterator[dict[str, Any]]:
    """Yield chats, and a share `documents` of prompts about as long as one worker's KV."""
    for _ in count():
        kind = _DOCUMENT_TOKENS if random.random() < documents else _PROMPT_TOKENS
        prompt = [random.randrange(100, vocabulary - 1) for _ in range(random.randint(*kind))]
        yield full_answer(prompt, random.randint(*_ANSWER_TOKENS))


def settings(*, settles: bool, recalls: bool) -> dict[str, object]:
    """Return the settings of a stack."""
    return {
        **PLAIN,
        "scheduler.policy": "kvasir",
        "scheduler.max_batch_sequences": 64,
        "worker.cores": [],
        "worker.kv_blocks": KV_BLOCKS,
        "worker.block_tokens": BLOCK_TOKENS,
        "worker.lending.borrow": True,
        "worker.lending.max_lent_fraction": 0.5,
        "worker.lending.low_fraction": 0.1,
        "worker.lending.high_fraction": 0.25,
        "worker.lending.keep_free_fraction": 0.0,
        "worker.lending.most_creditors": WORKERS - 1,
        "worker.lending.rest_s": 0.1,
        "worker.lending.bounce_blocks": 4,
        "worker.lending.recall": recalls,
        "ledger.settle": settles,
        "ledger.settle_threshold_tokens": 2 * BLOCK_TOKENS,
        "ledger.settle_interval_s": 0.5,
    }


_DEADLINE_S = 120.0
_SAMPLE_S = 0.25
_START_S = 60.0
_WINDOWS = 40
"""Number of points in a picture."""
_WANTED_AGAIN_S = 0.3
_WANTED_BEFORE_S = 1.5
"""Part of `wanted_s` before the load starts."""
_HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
)
_USER = "placement-0"
"""Bus user that may receive both reports."""


@dataclass
class _Clients:
    """Clients that send requests without end."""

    target: Target
    bodies: Iterator[dict[str, Any]]
    answers: list[Answer] = field(default_factory=list)
    """Ended answers."""

    async def client(self) -> None:
        while True:
            answer = await complete(self.target, next(self.bodies), _DEADLINE_S)
            self.answers.append(answer)


class _Witness:
    """Collects the latest heartbeat and the decoded tokens of each worker."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.decoded: list[tuple[float, int]] = []
        self.steps: list[Step] = []
        self._done: dict[str, tuple[int, int]] = {}
        """(plan, steps done of it) by worker."""
        self._latest: dict[str, WorkerReported] = {}

    def on_stepped(self, stepped: WorkerStepped) -> None:
        at_s, name = time.perf_counter() - self.began_s, stepped.worker_id
        self.decoded.append((at_s, stepped.decoded_tokens))
        plan, done = self._done.get(name, (0, 0))
        steps = stepped.steps_done - (done if plan == stepped.plan_seq else 0)
        self._done[name] = stepped.plan_seq, stepped.steps_done
        if steps > 0 and stepped.step_s > 0 and name in self._latest:
            self.steps.append(Step(at_s, _remote_blocks(self._latest[name]) > 0, steps, stepped.step_s))

    def on_reported(self, report: WorkerReported) -> None:
        self._latest[report.worker_id] = report

    async def until_all_reach(self, tokens: int) -> None:
        """Wait until every worker announces a context of `tokens`, so they know each other. Raises
        InternalError on a timeout."""
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    contexts = [report.max_context_tokens for report in self._latest.values()]
                    if len(contexts) == WORKERS and min(contexts) >= tokens:
                        break
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise InternalError(f"{len(self._latest)} workers came, for {WORKERS}") from None

    def begin(self) -> None:
        """Start the measurement."""
        self.began_s = time.perf_counter()
        self.decoded.clear()
        self.steps.clear()

    def used_blocks(self) -> tuple[int, int]:
        """Return remote and total blocks in use."""
        remote = used = 0
        for report in self._latest.values():
            remote += _remote_blocks(report)
            used += report.capacity.total_blocks - report.capacity.plannable_blocks
        return remote, used


def _remote_blocks(report: WorkerReported) -> int:
    """Return the borrowed blocks in use."""
    return max(0, report.capacity.borrowed_blocks - report.capacity.borrowed_free_blocks)


def measure(
    model: Path,
    run_dir: Path,
    requests: Iterator[dict[str, Any]],
    duration_s: float,
    load: Load,
    more: Mapping[str, object],
) -> LiveRun:
    """Measure one side on a new stack. Raises InternalError if it does not serve."""
    with start_stack(run_dir, more, model=model, workers=WORKERS) as stack:
        return asyncio.run(_run(stack, requests, duration_s, load))


async def _want(run_dir: Path, load: Load) -> None:
    """Tell the workers, as the scheduler would, that they need more memory than they have."""
    wanted = WantKv(tokens=(KV_BLOCKS + load.wanted_blocks) * BLOCK_TOKENS)
    async with on_bus(run_dir, "scheduler-0") as bus:
        until_s = time.perf_counter() + load.wanted_s
        while time.perf_counter() < until_s:
            for number in range(WORKERS):
                await bus.publish(subjects.worker_want(f"worker-{number}"), wanted)
            await asyncio.sleep(_WANTED_AGAIN_S)


async def _run(stack: Stack, requests: Iterator[dict[str, Any]], duration_s: float, load: Load) -> LiveRun:
    witness, clients = _Witness(), _Clients(stack.target, requests)
    shares: list[tuple[float, int, int]] = []
    async with on_bus(stack.run_dir, _USER, _HANDLERS, witness):
        await witness.until_all_reach(LONGEST_TOKENS)
        tasks: list[asyncio.Task[None]] = []
        if load.wanted_blocks:
            tasks.append(asyncio.create_task(_want(stack.run_dir, load)))
            await asyncio.sleep(_WANTED_BEFORE_S)
        witness.begin()
        tasks += [asyncio.create_task(clients.client()) for _ in range(load.clients)]
        while (at_s := time.perf_counter() - witness.began_s) < duration_s:
            shares.append((at_s, *witness.used_blocks()))
            await asyncio.sleep(_SAMPLE_S)
        counts = await _counts(stack.run_dir)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if not clients.answers:
        raise InternalError("no request was answered in time: is the duration too short?")
    errors = [answer.error for answer in clients.answers if not answer.ok]
    answered = len(clients.answers)
    return LiveRun(duration_s, witness.decoded, shares, answered, errors, counts, witness.steps)


async def _counts(run_dir: Path) -> dict[str, int]:
    """Return the counters of ledger and workers since their start."""
    run = RunDirectory(run_dir)
    access = BusAccess.from_state(run.read_state(), run.credentials())
    roll = RollCall(access.config(subjects.OPERATOR, connect_timeout_s=5.0))
    try:
        (ledger,) = await roll.ask("ledger", deadline_s=2.0, expected=1)
        workers = await roll.ask("worker", deadline_s=2.0, expected=WORKERS)
    finally:
        await roll.close()
    counts = {name: int(ledger.details.get(name, 0)) for name in ("settlements", "settlements_aborted")}
    for name in ("settled_blocks", "recalled_blocks"):
        counts[name] = sum(int(worker.details[name]) for worker in workers)
    return counts


class Run(Protocol):
    """One side on one workload, live or simulated. Times are seconds since its start."""

    def tok_s(self, first_s: float = ..., end_s: float = ...) -> float: ...

    def remote_share(self, first_s: float = ..., end_s: float = ...) -> float: ...


def draw_figure_10(
    path: Path, results: Mapping[str, Sequence[Run]], duration_s: float, how: str = "simulated"
) -> None:
    """Draw tokens per second above, and the remote share of KV below, as means over workloads."""
    window_s = duration_s / _WINDOWS
    rates: dict[str, list[tuple[float, float]]] = {side: [] for side in results}
    shares: dict[str, list[tuple[float, float]]] = {side: [] for side in results}
    for side, runs in results.items():
        for at in range(_WINDOWS):
            first_s, end_s = at * window_s, (at + 1) * window_s
            middle_s = first_s + window_s / 2
            rates[side].append((middle_s, fmean(one.tok_s(first_s, end_s) for one in runs)))
            shares[side].append((middle_s, fmean(one.remote_share(first_s, end_s) for one in runs)))
    above = Chart(rates, f"With and without DGFM ({how})", "", "output tok/s", marks=False)
    draw_lines(path, above, Chart(shares, "", "s", "remote share of the KV", marks=False, bottom=0))
