"""`python -m bench dgfm --live`: four real workers that borrow from each other under constant load.

Each side has its own stack and gets the same requests; the first side alternates. Throughput comes from step
reports, the remote share from heartbeats. The figure is the ratio of all tokens to those without settlements.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Protocol

from bench.kit.context import Context
from bench.kit.load import Answer, complete, full_answer
from bench.kit.models import TINY_CHAT, checkpoint, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.plots import Chart, draw_lines
from bench.kit.stacks import PLAIN, Stack, on_bus, start_stack
from shared import subjects
from shared.bus import Handler, Listener
from shared.errors import ConfigError, InternalError
from shared.messages.commands import WantKv
from shared.messages.plans import WorkerStepped
from shared.messages.reports import WorkerReported

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
    """Each worker is told for `wanted_s`, as by a scheduler, that it needs this many blocks more than it has.
    So workers borrow in circles."""
    wanted_s: float = 0.0


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

    def tok_s(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Return tokens per second in a part of the run."""
        end_s = min(end_s, self.duration_s)
        return sum(n for at_s, n in self.decoded if first_s <= at_s < end_s) / (end_s - first_s)

    def remote_share(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Return the share of KV in use that is remote, in a part of the run."""
        part = [(remote, used) for at_s, remote, used in self.shares if first_s <= at_s < end_s]
        return sum(remote for remote, _ in part) / max(1, sum(used for _, used in part))


SIDES = {"off": (False, False), "cycles": (True, False), "recalls": (False, True), "on": (True, True)}
"""(settles, recalls) by side."""
_SIDES_OF = {"circle": ("off", "cycles", "on"), "light": ("off", "recalls", "on"), "mixed": ("off", "on")}
_DURATION_S, _QUICK_S = 14.0, 7.0
_WORKLOADS, _QUICK_WORKLOADS = 3, 1
_WARM_SHARE = 0.2
"""Share at the start of a run that does not count."""
_MOST_REQUESTS = 20_000

_COUNTS = {"ledger": ("settlements", "settlements_aborted"), "worker": ("settled_blocks", "recalled_blocks")}

Runs = Mapping[str, Sequence[LiveRun]]
"""One run per workload, by side."""


def run_live(context: Context) -> Outcome:
    """Run the live part. Raises ConfigError for less than 5 s per side, or no workload, InternalError if a
    side does not serve."""
    flags = context.arguments
    duration_s = flags.duration_s or (_QUICK_S if context.quick else _DURATION_S)
    seeds = flags.seeds or (_QUICK_WORKLOADS if context.quick else _WORKLOADS)
    if duration_s < 5 or seeds < 1:
        raise ConfigError("dgfm --live needs 5 s a side and one workload at least", param="duration_s")
    load = LOADS[flags.load]
    results = _measure(context, load, seeds, duration_s)
    draw_figure_10(context.picture(f"figure10-live-{flags.load}"), results, duration_s, "live")
    first_s = _WARM_SHARE * duration_s
    figures = figures_of(results, first_s)
    return Outcome(
        figures=figures,
        failures=sum(len(one.errors) for runs in results.values() for one in runs),
        tables=[table_of(results, first_s)],
        notes=_notes(load, seeds, duration_s),
        headline=list(figures),
    )


def _measure(context: Context, load: Load, seeds: int, duration_s: float) -> dict[str, list[LiveRun]]:
    flags = context.arguments
    model = checkpoint(flags.model or str(TINY_CHAT))
    sides = _SIDES_OF[flags.load]
    results: dict[str, list[LiveRun]] = {side: [] for side in sides}
    with context.progress("live sides", seeds * len(sides)) as bar:
        for seed in range(context.seed, context.seed + seeds):
            turn = seed % len(sides)
            for side in sides[turn:] + sides[:turn]:
                settles, recalls = SIDES[side]
                requests = bodies(Random(f"dgfm/{seed}"), vocabulary(model), load.documents)
                folder = context.run_dir.resolve() / f"stack-{side}-{seed}"
                more = settings(settles=settles, recalls=recalls)
                with start_stack(folder, more, model=model, workers=WORKERS) as stack:
                    one = asyncio.run(_serve(stack, islice(requests, _MOST_REQUESTS), duration_s, load))
                results[side].append(one)
                row = {"side": side, "seed": seed, "tok_s": one.tok_s(), "remote": one.remote_share()}
                context.record(row | {"errors": one.errors, **one.counts}, "live.jsonl")
                bar.advance(now=f"{side}, workload {seed}")
    return results


def figures_of(results: Runs, first_s: float) -> dict[str, float]:
    """Return the figures. `throughput_vs_off` is the last side's; those of other sides have their name."""
    rates = {side: [one.tok_s(first_s) for one in runs] for side, runs in results.items()}
    last = list(results)[-1]
    figures: dict[str, float] = {}
    for side in [side for side in reversed(list(results)) if side != "off"]:
        label = "" if side == last else f"_{side}"
        ratios = [on / off for on, off in zip(rates[side], rates["off"], strict=True)]
        figures[f"throughput_vs_off{label}"] = sum(rates[side]) / sum(rates["off"])
        figures[f"throughput_vs_off{label}_worst"] = min(ratios)
        figures[f"throughput_vs_off{label}_best"] = max(ratios)
    for side, runs in results.items():
        figures[f"tok_s_{side}"] = fmean(rates[side])
        figures[f"remote_share_{side}"] = fmean(one.remote_share(first_s) for one in runs)
    for side, runs in results.items():
        if side != "off":
            for name in runs[0].counts:
                figures[f"{name}_{side}"] = fmean(one.counts[name] for one in runs)
    return figures


def table_of(results: Runs, first_s: float) -> Table:
    rows = [
        (side, at, one.tok_s(first_s), one.remote_share(first_s), one.finished, *one.counts.values())
        for side, runs in results.items()
        for at, one in enumerate(runs)
    ]
    counted = ("settlements", "aborted", "settled", "recalled")
    columns = ("side", "workload", "tok/s", "remote share", "finished", *counted)
    return Table("with and without DGFM, live", columns, rows)


def _notes(load: Load, seeds: int, duration_s: float) -> list[str]:
    asked = "chats" if not load.documents else f"chats, {load.documents:.0%} documents of 500 to 1,400 tokens"
    notes = [
        f"{WORKERS} workers of {KV_BLOCKS} KV blocks, {load.clients} clients without a pause, {asked}; "
        f"{seeds} workloads, {duration_s:.0f} s a side, of which the first {_WARM_SHARE:.0%} do not count",
        "cycles: cycles are settled; recalls: free memory takes blocks back; on: both; off: neither",
        "throughput_vs_off: all tokens of a side by all of off; worst and best: of one workload",
        "settlements and blocks: per run",
    ]
    if load.wanted_blocks:
        wanted = f"at the start each worker borrows {load.wanted_blocks} blocks for {load.wanted_s:.0f} s"
        notes.append(f"{wanted}: debts run in circles")
    return notes


class _Witness:
    """Collects the latest heartbeat and the decoded tokens of each worker."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.decoded: list[tuple[float, int]] = []
        self._latest: dict[str, WorkerReported] = {}

    def on_stepped(self, stepped: WorkerStepped) -> None:
        self.decoded.append((time.perf_counter() - self.began_s, stepped.decoded_tokens))

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

    def used_blocks(self) -> tuple[int, int]:
        """Return remote and total blocks in use."""
        remote = used = 0
        for report in self._latest.values():
            remote += max(0, report.capacity.borrowed_blocks - report.capacity.borrowed_free_blocks)
            used += report.capacity.total_blocks - report.capacity.plannable_blocks
        return remote, used


async def _want(run_dir: Path, load: Load) -> None:
    """Tell the workers, as the scheduler would, that they need more memory than they have."""
    wanted = WantKv(tokens=(KV_BLOCKS + load.wanted_blocks) * BLOCK_TOKENS)
    async with on_bus(run_dir, "scheduler-0") as bus:
        until_s = time.perf_counter() + load.wanted_s
        while time.perf_counter() < until_s:
            for number in range(WORKERS):
                await bus.publish(subjects.worker_want(f"worker-{number}"), wanted)
            await asyncio.sleep(_WANTED_AGAIN_S)


async def _serve(stack: Stack, requests: Iterator[dict[str, Any]], duration_s: float, load: Load) -> LiveRun:
    witness, answers = _Witness(), list[Answer]()
    shares: list[tuple[float, int, int]] = []

    async def client() -> None:
        for body in requests:
            answers.append(await complete(stack.target, body, _DEADLINE_S))

    async with on_bus(stack.run_dir, _USER, _HANDLERS, witness):
        await witness.until_all_reach(LONGEST_TOKENS)
        tasks: list[asyncio.Task[None]] = []
        if load.wanted_blocks:
            tasks.append(asyncio.create_task(_want(stack.run_dir, load)))
            await asyncio.sleep(_WANTED_BEFORE_S)
        witness.begin()
        tasks += [asyncio.create_task(client()) for _ in range(load.clients)]
        while (at_s := time.perf_counter() - witness.began_s) < duration_s:
            shares.append((at_s, *witness.used_blocks()))
            await asyncio.sleep(_SAMPLE_S)
        counts = _counts(stack)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if not answers:
        raise InternalError("no request was answered in time: is the duration too short?")
    errors = [answer.error for answer in answers if not answer.ok]
    return LiveRun(duration_s, witness.decoded, shares, len(answers), errors, counts)


def _counts(stack: Stack) -> dict[str, int]:
    """Return the counters of ledger and workers since their start."""
    services = stack.services()
    return {
        name: sum(int(row["details"].get(name, 0)) for row in services if row["service"] == service)
        for service, names in _COUNTS.items()
        for name in names
    }


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
