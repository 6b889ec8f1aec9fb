"""The running sides: bound to their cores, all but one stopped, every cell written down at once."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.cores import Cores, pin
from bench.kit.load import Answer, Target, first_error
from bench.kit.peers import Server
from bench.live.engine.measure import warm
from bench.live.serve.load import Level, ask_all, ask_at_rate, measure
from shared.errors import InternalError

CELLS_FILE = "cells.jsonl"
Row = Mapping[str, Any]
_SECOND_WATCH = 32
"""Requests of the second look for the engine's thread."""


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
    """What the sides are asked. `truths` belongs to `measured`, in answer tokens."""

    measured: Sequence[Sequence[int]]
    truths: Sequence[int]
    max_tokens: int


@dataclass
class Arena:
    """Sides by name, each admitted once."""

    context: Context
    cores: Cores
    sides: dict[str, Server] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)

    def admit(self, served: Server, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """Finds and binds the engine's thread while the side answers `prompts`, stops the side; the answers.

        Raises InternalError when one of them fails.
        """
        answered: list[Answer] = []
        self.context.say(f"{served.name}: {len(prompts)} prompts to warm up and to learn from")
        for asked in (prompts, prompts[:_SECOND_WATCH]):  # the second runs as it will be measured
            thread = pin(
                served.side, self.cores, lambda: answered.extend(ask_all(served.target, asked, max_tokens)),  # noqa: B023
                served.engine,
            )  # fmt: skip
        if error := first_error(answered):
            raise InternalError(f"{served.name} fails while it warms up: {error}\n{served.side.tail()}")
        self.sides[served.name], self._threads[served.name] = served, thread
        served.side.pause()
        return answered[: len(prompts)]

    def run(self, cell: RateCell, workload: Workload, level: Level | None) -> Row:
        """The row that was written for it."""
        served = self.sides[cell.side]
        served.side.resume()
        try:
            warm(served)
            before, began_s = served.side.cpu_s(), time.perf_counter()
            asked = ask_at_rate(
                served.target,
                workload.measured,
                workload.truths,
                requests=cell.requests,
                rate_per_s=cell.rate_per_s,
                max_tokens=workload.max_tokens,
                seed=f"{self.context.seed}/{cell.repeat}",
            )
            wall_s, after = time.perf_counter() - began_s, served.side.cpu_s()
        finally:
            served.side.pause()
        engine = self._threads[cell.side]
        used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
        row: dict[str, Any] = {
            "kind": cell.kind,
            "side": cell.side,
            "rate_per_s": cell.rate_per_s,
            "repeat": cell.repeat,
            **measure(asked, level).row(),
            "engine_share": used.pop(engine, 0.0) / wall_s,
            "rest_share": sum(used.values()) / wall_s,
        }
        place = {name: row[name] for name in ("kind", "side", "rate_per_s", "repeat")}
        for one in asked:
            self.context.record({**place, **one.row()})
        self.context.record(row, CELLS_FILE)
        return row


def rows_of(run_dir: Path) -> dict[tuple[str, str, float, int], Row]:
    """What a run has measured so far, by `RateCell.key`."""
    file = run_dir / CELLS_FILE
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(row["kind"], row["side"], round(row["rate_per_s"], 4), row["repeat"]): row for row in rows}


def true_lengths(target: Target, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """How long the greedy answers are, in tokens, by asking. Raises InternalError when one fails."""
    answered = ask_all(target, prompts, max_tokens)
    if error := first_error(answered):
        raise InternalError(f"the true lengths cannot be learned: {error}")
    return [one.completion_tokens for one in answered]
