"""Two servers take turns on each workload: the idle one is stopped, the other has both cores.

Every measurement is appended to `cells.jsonl` at once, so an interrupted run can resume.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.kit.context import CELLS_FILE, Context
from bench.kit.cores import Cores, pin
from bench.kit.load import Answer, check, first_error, full_answer, run_batch
from bench.kit.stacks import Server
from bench.kit.stats import order_of

_SPREAD = 0.1
"""Prompt lengths vary uniformly by this share, so that sequences are not in step."""
_WARM_UP_TOKENS = 16
_WARM_UP_DEADLINE_S = 300.0
_BASE_DEADLINE_S = 60.0
_SLOWEST_TOKENS_PER_S = 20.0
_WARM_DEADLINE_S = 60.0
_FEWEST_SEQUENCES = 8
"""A cell is repeated until this many sequences ran, because single short answers are noisy."""


@dataclass(frozen=True)
class BatchCell:
    """One workload: `batch` requests at once, each with about `context` prompt tokens."""

    context: int
    batch: int
    output_tokens: int

    @property
    def rounds(self) -> int:
        """Number of consecutive runs of the batch."""
        return max(1, min(4, _FEWEST_SEQUENCES // self.batch))

    @property
    def tokens(self) -> int:
        """Output tokens of the whole cell."""
        return self.rounds * self.batch * self.output_tokens

    @property
    def name(self) -> str:
        return f"b{self.batch}_ctx{self.context}"


def cells(contexts: list[int], batches: list[int], output_tokens: int) -> list[BatchCell]:
    """Return the cells, smallest first."""
    return [
        BatchCell(context, batch, output_tokens) for context in sorted(contexts) for batch in sorted(batches)
    ]


def bodies(cell: BatchCell, vocabulary: int, draw: random.Random) -> list[list[dict[str, Any]]]:
    """Return request bodies by round, with new random token ids, so that no prompts share a prefix."""
    return [[_body(cell, vocabulary, draw) for _ in range(cell.batch)] for _ in range(cell.rounds)]


def _body(cell: BatchCell, vocabulary: int, draw: random.Random) -> dict[str, Any]:
    length = max(1, round(cell.context * draw.uniform(1 - _SPREAD, 1 + _SPREAD)))
    first = min(16, vocabulary // 2)
    return full_answer([draw.randrange(first, vocabulary) for _ in range(length)], cell.output_tokens)


@dataclass(frozen=True)
class Measured:
    """One cell on one side."""

    wall_s: float
    """From the first request to the end of the last answer, over all rounds."""
    tok_s: float
    """Output tokens per second of `wall_s`, prefill included."""
    decode_tok_s: float
    """Rate while all sequences of the batch decode: from the last first token to the first end."""
    ttft_ms_p50: float
    itl_ms_p50: float
    failures: int
    error: str
    client_share: float
    """CPU time of this client / wall time."""
    engine_share: float
    """CPU time of the engine's thread / wall time."""
    rest_share: float
    """CPU time of the side's other threads / wall time; with the client's, the load of their core."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    served: Server, engine_thread: int, cell: BatchCell, rounds: Sequence[Sequence[dict[str, Any]]]
) -> tuple[Measured, list[list[Answer]]]:
    """Run the rounds of a cell."""
    deadline_s = _BASE_DEADLINE_S + (cell.batch * (cell.context + cell.output_tokens)) / _SLOWEST_TOKENS_PER_S
    before, client_before_s = served.tree.cpu_s(), time.process_time()
    began_s = time.perf_counter()
    answers = [run_batch(served.target, bodies, deadline_s) for bodies in rounds]
    wall_s = time.perf_counter() - began_s
    client_s = time.process_time() - client_before_s
    used = _used(before, served.tree.cpu_s())
    engine_s = used.pop(engine_thread, 0.0)
    everyone = [one for batch in answers for one in batch]
    failures = check(everyone, cell.output_tokens)
    return (
        Measured(
            wall_s=wall_s,
            tok_s=sum(one.completion_tokens for one in everyone if one.ok) / wall_s,
            decode_tok_s=_decode_rate(answers, cell) if not failures else 0.0,
            ttft_ms_p50=_median_ms([one.first_s for one in everyone if one.event_s]),
            itl_ms_p50=_median_ms([gap for one in everyone for gap in _gaps(one)]),
            failures=failures,
            error=first_error(everyone),
            client_share=client_s / wall_s,
            engine_share=engine_s / wall_s,
            rest_share=sum(used.values()) / wall_s,
        ),
        answers,
    )


def warm(served: Server, within_s: float = _WARM_DEADLINE_S) -> None:
    """Wait until a resumed side answers; a stack must first notice that time has passed.

    Raises TimeoutError.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        (answer,) = run_batch(served.target, [full_answer([17, 18, 19], 4)], deadline_s=5.0)
        if answer.ok and answer.completion_tokens == 4:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{served.name} does not answer after its pause: {answer.error}")
        time.sleep(0.1)


def _used(before: Mapping[int, float], after: Mapping[int, float]) -> dict[int, float]:
    return {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}


def _decode_rate(answers: Sequence[Sequence[Answer]], cell: BatchCell) -> float:
    """Return tokens per second while all sequences of a batch decode; 0 if there is no such time."""
    tokens, seconds = 0.0, 0.0
    for batch in answers:
        if not all(one.event_s for one in batch):
            return 0.0  # With random weights, an answer may have no text.
        begin_s = max(one.event_s[0] for one in batch)
        end_s = min(one.event_s[-1] for one in batch)
        if end_s <= begin_s:
            return 0.0
        for one in batch:
            per_event = cell.output_tokens / len(one.event_s)
            tokens += per_event * sum(begin_s < at <= end_s for at in one.event_s)
        seconds += end_s - begin_s
    return tokens / seconds


def _gaps(answer: Answer) -> list[float]:
    return [b - a for a, b in zip(answer.event_s, answer.event_s[1:], strict=False)]


def _median_ms(values_s: Sequence[float]) -> float:
    return statistics.median(values_s) * 1e3 if values_s else 0.0


@dataclass
class Duel:
    """The sides, started and bound; `sides[0]` is ours."""

    context: Context
    sides: Sequence[Server]
    cores: Cores
    vocabulary: int
    engine_threads: list[int] = field(default_factory=list)

    def prepare(self, widest: BatchCell) -> None:
        """Warm up each side with a batch of `widest`, bind its engine thread, and stop it."""
        self.cores.bind_client()
        for served in self.sides:
            self.context.say(f"{served.name}: warming up")
            load = bodies(
                BatchCell(widest.context, widest.batch, _WARM_UP_TOKENS), self.vocabulary, random.Random(0)
            )
            for _ in range(2):  # the first finds the thread; the second warms up as measured
                thread = pin(
                    served.tree,
                    self.cores,
                    lambda: run_batch(served.target, load[0], _WARM_UP_DEADLINE_S),  # noqa: B023
                    served.engine,
                )
            self.engine_threads.append(thread)
            served.tree.pause()

    def turn(self, cell: BatchCell, alternation: int) -> dict[str, Measured]:
        """Run one cell on every side, in the order of the alternation; return results by side."""
        purpose = f"{alternation}/{cell.name}"
        rounds = bodies(cell, self.vocabulary, self.context.random(purpose))
        results: dict[str, Measured] = {}
        for index in order_of(alternation, len(self.sides)):
            served = self.sides[index]
            served.tree.resume()
            warm(served)
            measured, answers = measure(served, self.engine_threads[index], cell, rounds)
            served.tree.pause()
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


def missing(
    plan: Iterable[tuple[int, BatchCell]], rows: Sequence[dict[str, Any]]
) -> list[tuple[int, BatchCell]]:
    """Return the turns of a plan that lack a row of either side."""
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
    """Run turns until the next one would exceed `budget_s`; return how many were left out."""
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
