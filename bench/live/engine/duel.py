"""Two servers take turns on one workload after another: the idle one is stopped, the other has both cores.

Everything measured is appended to `cells.jsonl` at once, so a run cut short goes on where it stopped.
"""

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.cores import Cores, pin
from bench.kit.load import Answer, run_batch
from bench.kit.peers import Server
from bench.kit.turns import order_of
from bench.live.engine.measure import Measured, measure, warm
from bench.live.engine.workload import BatchCell, bodies

CELLS_FILE = "cells.jsonl"
_WARM_UP_TOKENS = 16
_WARM_UP_DEADLINE_S = 300.0


@dataclass
class Duel:
    """The sides, started and bound; `sides[0]` is ours."""

    context: Context
    sides: Sequence[Server]
    cores: Cores
    vocabulary: int
    engine_threads: list[int] = field(default_factory=list)

    def prepare(self, widest: BatchCell) -> None:
        """Warms up each side with a batch of `widest`, finds its engine thread, binds it, stops it."""
        self.cores.bind_client()
        for served in self.sides:
            self.context.say(f"{served.name}: warming up")
            load = bodies(
                BatchCell(widest.context, widest.batch, _WARM_UP_TOKENS), self.vocabulary, random.Random(0)
            )
            for _ in range(2):  # the first finds the thread; the second runs as it will be measured
                thread = pin(
                    served.side,
                    self.cores,
                    lambda: run_batch(served.target, load[0], _WARM_UP_DEADLINE_S),  # noqa: B023
                    served.engine,
                )
            self.engine_threads.append(thread)
            served.side.pause()

    def turn(self, cell: BatchCell, alternation: int) -> dict[str, Measured]:
        """One cell on every side, who goes first by the number of the alternation. By name of the side."""
        purpose = f"{alternation}/{cell.name}"
        rounds = bodies(cell, self.vocabulary, self.context.random(purpose))
        results: dict[str, Measured] = {}
        for index in order_of(alternation, len(self.sides)):
            served = self.sides[index]
            served.side.resume()
            warm(served)
            measured, answers = measure(served, self.engine_threads[index], cell, rounds)
            served.side.pause()
            results[served.name] = measured
            self._record(cell, alternation, served.name, measured, answers)
        return results

    def _record(
        self, cell: BatchCell, alternation: int, side: str, measured: Measured, answers: list[list[Answer]]
    ) -> None:
        place = {"alternation": alternation, "cell": cell.name, "side": side}
        self.context.record({**place, **measured.row()}, CELLS_FILE)
        for at, batch in enumerate(answers):
            for one in batch:
                self.context.record({**place, "round": at, **_request_row(one)})


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has measured so far."""
    file = run_dir / CELLS_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def missing(
    plan: Iterable[tuple[int, BatchCell]], rows: Sequence[dict[str, Any]]
) -> list[tuple[int, BatchCell]]:
    """The turns of a plan that no two rows tell of."""
    sides: dict[tuple[int, str], set[str]] = {}
    for row in rows:
        sides.setdefault((row["alternation"], row["cell"]), set()).add(row["side"])
    return [(turn, cell) for turn, cell in plan if len(sides.get((turn, cell.name), ())) < 2]


def run_turns(
    duel: Duel,
    turns: Sequence[tuple[int, BatchCell]],
    *,
    budget_s: float,
    now_s: Callable[[], float] = time.monotonic,
) -> int:
    """Runs turns until they are done or the next would not end within `budget_s`; how many were left out."""
    began_s = now_s()
    took_s: dict[str, float] = {}
    with duel.context.progress("alternations × workloads", len(turns)) as progress:
        for at, (alternation, cell) in enumerate(turns):
            turn_began_s = now_s()
            if turn_began_s - began_s + took_s.get(cell.name, 0.0) > budget_s:
                return len(turns) - at
            duel.turn(cell, alternation)
            took_s[cell.name] = now_s() - turn_began_s
            progress.advance(now=cell.name)
    return 0


def _request_row(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "ttft_ms": answer.first_s * 1e3 if answer.event_s else None,
        "total_ms": (answer.ended_s - answer.sent_s) * 1e3,
        "events": len(answer.event_s),
        "error": answer.error,
    }
