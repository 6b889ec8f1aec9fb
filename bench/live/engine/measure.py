"""One cell on one side: its requests, its tokens a second, and who used which core meanwhile."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.kit.load import Answer, check, first_error, run_batch
from bench.kit.peers import Server
from bench.live.engine.workload import BatchCell

_BASE_DEADLINE_S = 60.0
_SLOWEST_TOKENS_PER_S = 20.0
_WARM_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Measured:
    """Of one cell on one side."""

    wall_s: float
    """From the first request sent to the last answer ended, all rounds added up."""
    tok_s: float
    """Output tokens per second of `wall_s`: prefill is in it."""
    decode_tok_s: float
    """While every sequence of the batch was answering: from the last first token to the first end."""
    ttft_ms_p50: float
    itl_ms_p50: float
    failures: int
    error: str
    client_share: float
    """CPU time of this client / wall time."""
    engine_share: float
    """CPU time of the engine's thread / wall time."""
    rest_share: float
    """CPU time of all other threads of the side / wall time; with the client's, what its core was busy."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    served: Server, engine_thread: int, cell: BatchCell, rounds: Sequence[Sequence[dict[str, Any]]]
) -> tuple[Measured, list[list[Answer]]]:
    """Runs the rounds of a cell one after the other."""
    deadline_s = _BASE_DEADLINE_S + (cell.batch * (cell.context + cell.output_tokens)) / _SLOWEST_TOKENS_PER_S
    before, client_before_s = served.side.cpu_s(), time.process_time()
    began_s = time.perf_counter()
    answers = [run_batch(served.target, bodies, deadline_s) for bodies in rounds]
    wall_s = time.perf_counter() - began_s
    client_s = time.process_time() - client_before_s
    used = _used(before, served.side.cpu_s())
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
    """Returns when the side answers again; after a pause a stack has to notice first that time has passed.

    Raises TimeoutError.
    """
    body = {"prompt": [17, 18, 19], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    deadline_s = time.monotonic() + within_s
    while True:
        (answer,) = run_batch(served.target, [body], deadline_s=5.0)
        if answer.ok and answer.completion_tokens == 4:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{served.name} does not answer after its pause: {answer.error}")
        time.sleep(0.1)


def _used(before: Mapping[int, float], after: Mapping[int, float]) -> dict[int, float]:
    return {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}


def _decode_rate(answers: Sequence[Sequence[Answer]], cell: BatchCell) -> float:
    """Tokens per second of the time in which all sequences of a batch were answering; 0: none."""
    tokens, seconds = 0.0, 0.0
    for batch in answers:
        if not all(one.event_s for one in batch):
            return 0.0  # Random weights: no token of that answer was text.
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
