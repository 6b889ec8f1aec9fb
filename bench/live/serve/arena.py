"""The running sides: bound to their cores, all but one stopped, with every cell recorded at once."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from bench.kit.context import CELLS_FILE, Context, read_cells
from bench.kit.cores import Cores, pin, watch
from bench.kit.load import Answer, Target, first_error, serve_all
from bench.kit.stacks import Server
from bench.live.engine.duel import warm
from bench.live.serve.prompts import indices
from shared.errors import InternalError
from sim.workloads import poisson_times

_AT_ONCE = 96
"""Concurrent requests at full speed."""


@dataclass(frozen=True)
class Level:
    """The service level: `scale · (prefill_s + token_s · true answer tokens)`."""

    prefill_s: float
    token_s: float
    scale: float

    def limit_s(self, output_tokens: int) -> float:
        return self.scale * (self.prefill_s + self.token_s * output_tokens)


@dataclass(frozen=True)
class Asked:
    """One request. Times in seconds; `planned_s` is `time.perf_counter()`, as in the answer."""

    prompt: int
    planned_s: float
    true_tokens: int
    answer: Answer

    @property
    def took_s(self) -> float:
        return self.answer.ended_s - self.planned_s

    def row(self) -> dict[str, Any]:
        """Return the row for the record."""
        one = self.answer
        return {
            "prompt": self.prompt,
            "prompt_tokens": one.prompt_tokens,
            "completion_tokens": one.completion_tokens,
            "true_tokens": self.true_tokens,
            "late_ms": (one.sent_s - self.planned_s) * 1e3,
            "ttft_ms": (one.event_s[0] - self.planned_s) * 1e3 if one.event_s else None,
            "total_ms": self.took_s * 1e3,
            "finish_reason": one.finish_reason,
            "error": one.error,
        }


@dataclass(frozen=True)
class Measured:
    """Result of one cell."""

    requests: int
    failures: int
    error: str
    wall_s: float
    """From the first planned arrival to the last end."""
    tok_s: float
    normalized_ms: float
    """Mean over answers of (end − arrival) / output tokens."""
    ttft_ms_mean: float
    ttft_ms_p50: float
    itl_ms_p50: float
    """Median over answers of (end − first text) / (output tokens − 1)."""
    attained: float | None
    """Share of all requests within the service level; None if that is not yet known."""
    attained_first: float | None
    """The same for the first quarter of the arrivals."""
    same_length: float
    """Share of answers with their true length."""
    late_ms_max: float
    """Largest delay of the client when sending."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def body_of(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return a greedy request with a natural end and the common limit, which reveals nothing about its
    length."""
    return {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}


def ask_all(target: Target, prompts: Sequence[Sequence[int]], max_tokens: int) -> Sequence[Answer]:
    """Answer all prompts as fast as possible; return answers in the order of `prompts`."""
    bodies = [body_of(prompt, max_tokens) for prompt in prompts]
    return uvloop.run(serve_all(target, bodies, _AT_ONCE)).answers


def ask_at_rate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    truths: Sequence[int],
    *,
    requests: int,
    rate_per_s: float,
    max_tokens: int,
    seed: str,
) -> list[Asked]:
    """Send requests at Poisson times until all ended. `truths` are only recorded, not sent."""
    draw = random.Random(seed)
    chosen = indices(len(prompts), requests, draw)
    due_s = list(islice(poisson_times(draw, rate_per_s), requests))
    bodies = [body_of(prompts[index], max_tokens) for index in chosen]
    sent = uvloop.run(serve_all(target, bodies, requests, due_s=due_s))
    planned_s = [sent.began_s + at_s for at_s in due_s]
    return [
        Asked(index, at_s, truths[index], answer)
        for index, at_s, answer in zip(chosen, planned_s, sent.answers, strict=True)
    ]


def measure(asked: Sequence[Asked], level: Level | None) -> Measured:
    """Return the result of a cell. Failed requests miss the service level and count in no latency."""
    good = [one for one in asked if _is_good(one)]
    answers = [one.answer for one in good]
    wall_s = max(one.answer.ended_s for one in asked) - min(one.planned_s for one in asked)
    first_ms = [1e3 * (one.answer.event_s[0] - one.planned_s) for one in good]
    gaps_ms = [
        1e3 * (one.ended_s - one.event_s[0]) / (one.completion_tokens - 1)
        for one in answers
        if one.completion_tokens > 1
    ]
    return Measured(
        requests=len(asked),
        failures=len(asked) - len(good),
        error=first_error([one.answer for one in asked]),
        wall_s=wall_s,
        tok_s=sum(one.completion_tokens for one in answers) / wall_s,
        normalized_ms=_mean([1e3 * one.took_s / one.answer.completion_tokens for one in good]),
        ttft_ms_mean=_mean(first_ms),
        ttft_ms_p50=statistics.median(first_ms) if first_ms else 0.0,
        itl_ms_p50=statistics.median(gaps_ms) if gaps_ms else 0.0,
        attained=_attained(asked, level),
        attained_first=_attained(asked[: -(-len(asked) // 4)], level),
        same_length=_mean([float(one.answer.completion_tokens == one.true_tokens) for one in good]),
        late_ms_max=max(1e3 * (one.answer.sent_s - one.planned_s) for one in asked),
    )


def _attained(asked: Sequence[Asked], level: Level | None) -> float | None:
    if level is None:
        return None
    return _mean([float(_is_good(one) and one.took_s <= level.limit_s(one.true_tokens)) for one in asked])


def _is_good(one: Asked) -> bool:
    return one.answer.ok and one.answer.completion_tokens > 0 and bool(one.answer.event_s)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


Row = Mapping[str, Any]
_SECOND_WATCH = 32
"""Number of requests of the second warm-up."""


@dataclass(frozen=True)
class RateCell:
    """One measurement of one side."""

    kind: str
    """`low`, `burst`, `search` or `beyond` (1.2 times the peer's knee)."""
    side: str
    rate_per_s: float
    requests: int
    repeat: int = 0

    @property
    def key(self) -> tuple[str, str, float, int]:
        return (self.kind, self.side, round(self.rate_per_s, 4), self.repeat)


@dataclass(frozen=True)
class Workload:
    """Prompts of a cell, and `truths`, their answer tokens."""

    measured: Sequence[Sequence[int]]
    truths: Sequence[int]
    max_tokens: int


@dataclass
class Arena:
    """Sides by name, each admitted once."""

    context: Context
    cores: Cores
    workers: int = 1
    """Workers of each side. With more than one, none is bound to a core."""
    sides: dict[str, Server] = field(default_factory=dict)
    _threads: dict[str, list[int]] = field(default_factory=dict)
    """Engine threads by side."""

    def admit(self, served: Server, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """Bind a side's engine thread while it answers `prompts`, stop the side, and return the answers.

        Raises InternalError if an answer fails.
        """
        answered: list[Answer] = []
        self.context.say(f"{served.name}: {len(prompts)} prompts to warm up and to learn from")
        for asked in (prompts, prompts[:_SECOND_WATCH]):  # the second warms up as measured
            load = lambda: answered.extend(ask_all(served.target, asked, max_tokens))  # noqa: B023, E731
            if self.workers == 1:
                threads = [pin(served.tree, self.cores, load, served.engine)]
            else:
                names = [f"worker-{number}" for number in range(self.workers)]
                threads = watch(served.tree, load, names)
        if error := first_error(answered):
            raise InternalError(f"{served.name} fails while it warms up: {error}\n{served.tree.tail()}")
        self.sides[served.name], self._threads[served.name] = served, threads
        served.tree.pause()
        return answered[: len(prompts)]

    def run(self, cell: RateCell, workload: Workload, level: Level | None) -> Row:
        """Run a cell and return the row recorded for it."""
        served = self.sides[cell.side]
        served.tree.resume()
        try:
            warm(served)
            before, began_s = served.tree.cpu_s(), time.perf_counter()
            asked = ask_at_rate(
                served.target,
                workload.measured,
                workload.truths,
                requests=cell.requests,
                rate_per_s=cell.rate_per_s,
                max_tokens=workload.max_tokens,
                seed=f"{self.context.seed}/{cell.repeat}",
            )
            wall_s, after = time.perf_counter() - began_s, served.tree.cpu_s()
        finally:
            served.tree.pause()
        used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
        row: dict[str, Any] = {
            "kind": cell.kind,
            "side": cell.side,
            "rate_per_s": cell.rate_per_s,
            "repeat": cell.repeat,
            **measure(asked, level).row(),
            "engine_share": sum(used.pop(one, 0.0) for one in self._threads[cell.side]) / wall_s,
            "rest_share": sum(used.values()) / wall_s,
        }
        place = {name: row[name] for name in ("kind", "side", "rate_per_s", "repeat")}
        for one in asked:
            self.context.record({**place, **one.row()})
        self.context.record(row, CELLS_FILE)
        return row


def rows_of(run_dir: Path) -> dict[tuple[str, str, float, int], Row]:
    """Return all cells measured so far, by `RateCell.key`."""
    return {
        (row["kind"], row["side"], round(row["rate_per_s"], 4), row["repeat"]): row
        for row in read_cells(run_dir)
    }


def true_lengths(target: Target, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """Return the token counts of the greedy answers. Raises InternalError if one fails."""
    answered = ask_all(target, prompts, max_tokens)
    if error := first_error(answered):
        raise InternalError(f"the true lengths cannot be learned: {error}")
    return [one.completion_tokens for one in answered]
