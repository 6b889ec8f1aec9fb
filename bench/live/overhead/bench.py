"""`python -m bench overhead`: the engine through gateway, bus and scheduler, against direct calls.

One core is for the engine, one for everything else and the client. Sides take turns with prompts of one
length, batched by the same policy. Then many streams open at once.
"""

import itertools
import random
import statistics
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.load import Answer, check, first_error, full_answer, run_batch
from bench.kit.models import TINY_CHAT, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import PLAIN, Stack, start_stack
from bench.kit.stats import alternate, ratio_of
from bench.live.overhead.direct import DirectEngine
from bench.live.overhead.streams import Held, hold
from shared.errors import InternalError


@dataclass(frozen=True)
class Pace:
    """Times of one batch on one side, in seconds."""

    first_s: float
    """Median time to the first token."""
    gap_s: float
    """Median gap between two tokens of an answer."""
    tok_s: float
    """Tokens per second up to the last token."""


def pace_of(token_s: Sequence[Sequence[float]], tokens: int, total_s: float) -> Pace:
    """Return the pace, given each answer's token times since its request. Raises ValueError without gaps."""
    gaps = [b - a for one in token_s for a, b in itertools.pairwise(one)]
    if not gaps or total_s <= 0:
        raise ValueError("no answer of two tokens to measure")
    return Pace(statistics.median(one[0] for one in token_s), statistics.median(gaps), tokens / total_s)


def median_difference_ms(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    """Return the median of ours minus theirs over alternations. Raises ValueError if they do not pair up."""
    return statistics.median(a - b for a, b in zip(ours_s, theirs_s, strict=True)) * 1e3


_MAX_SEQUENCES = 64
_KV_BLOCKS = 4096
_DEADLINE_S = 120.0
_BATCHES = (1, 32, 64)


@dataclass(frozen=True)
class _Compared:
    """Paces of both sides for one batch size, by alternation."""

    batch: int
    served: list[Pace]
    direct: list[Pace]
    idle_share: float
    failures: int


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=TINY_CHAT, help="folder of the checkpoint")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt [%(default)s]")
    parser.add_argument("--streams", type=int, default=1000, help="opened at once [%(default)s]")
    parser.add_argument("--stream-tokens", type=int, default=32, help="of each answer there [%(default)s]")
    parser.add_argument("--alternations", type=int, help="of the two sides [7, quick: 3]")
    parser.add_argument("--output-tokens", type=int, help="of each answer compared [192, quick: 48]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if there is only one core."""
    cores = Cores.choose()
    model: Path = context.arguments.model.resolve()
    context.say("starting a stack, and an engine beside it")
    settings = {
        **PLAIN,
        "worker.cores": [cores.engine],
        "worker.kv_blocks": _KV_BLOCKS,
        "scheduler.max_batch_sequences": _MAX_SEQUENCES,
    }
    with start_stack(context.run_dir.resolve() / "stack", settings, model=model) as stack:
        stack.confine(cores)
        cores.bind_client()
        direct = DirectEngine(model, cores.engine, _KV_BLOCKS)
        with direct:
            compared = [_compare(context, stack, direct, batch) for batch in _BATCHES]
        held = _hold(context, stack)
    return _outcome(compared, held)


def _compare(context: Context, stack: Stack, direct: DirectEngine, batch: int) -> _Compared:
    arguments, quick = context.arguments, context.quick
    alternations = arguments.alternations or (3 if quick else 7)
    tokens = arguments.output_tokens or (48 if quick else 192)
    draw, failures = context.random(f"batch {batch}"), 0
    rounds = max(1, 8 // batch)

    def served() -> Pace:
        nonlocal failures
        answers: list[Answer] = []
        spent_s = 0.0
        for _ in range(rounds):
            bodies = _bodies(arguments.model, arguments.prompt_tokens, tokens, batch, draw)
            got = run_batch(stack.target, bodies, _DEADLINE_S)
            spent_s += max(one.event_s[-1] for one in got if one.event_s) - min(one.sent_s for one in got)
            answers += got
        failures += check(answers, tokens)
        if first_error(answers):
            raise InternalError(f"a request failed: {first_error(answers)}")
        times = [[at - one.sent_s for at in one.event_s] for one in answers]
        return pace_of(times, tokens * len(answers), spent_s)

    def called() -> Pace:
        times: list[list[float]] = []
        spent_s = 0.0
        for _ in range(rounds):
            bodies = _bodies(arguments.model, arguments.prompt_tokens, tokens, batch, draw)
            got = direct.run([body["prompt"] for body in bodies], tokens, _MAX_SEQUENCES)
            spent_s += max(one[-1] for one in got)
            times += got
        return pace_of(times, tokens * len(times), spent_s)

    served(), called()
    failures = 0
    context.say(f"batch {batch}: {alternations} alternations")
    before = _engine_time_s(stack)
    ours, theirs = alternate([served, called], alternations)
    computed_s, idle_s = (b - a for a, b in zip(before, _engine_time_s(stack), strict=True))
    return _Compared(
        batch=batch, served=ours, direct=theirs, idle_share=idle_s / (computed_s + idle_s), failures=failures
    )


def _engine_time_s(stack: Stack) -> tuple[float, float]:
    """Return the seconds since the start that the engine computed, and that it was idle although there was
    work."""
    details = stack.details("engine_s")
    return float(details["engine_s"]), float(details["between_steps_s"])


def _bodies(
    model: Path, prompt_tokens: int, tokens: int, count: int, draw: random.Random
) -> list[dict[str, Any]]:
    """Return prompts of random token ids without shared prefixes."""
    ids = vocabulary(model)
    prompts = ([draw.randrange(ids // 2, ids) for _ in range(prompt_tokens)] for _ in range(count))
    return [full_answer(prompt, tokens) for prompt in prompts]


def _hold(context: Context, stack: Stack) -> Held:
    arguments = context.arguments
    context.say(f"{arguments.streams} streams at once")
    bodies = _bodies(
        arguments.model,
        arguments.prompt_tokens,
        arguments.stream_tokens,
        arguments.streams,
        context.random("streams"),
    )
    return hold(stack.target, bodies, arguments.stream_tokens, stack.process("gateway-0"), _DEADLINE_S)


def _outcome(compared: Sequence[_Compared], held: Held) -> Outcome:
    figures: dict[str, float] = {}
    for one in compared:
        suffix = "" if one.batch == 1 else f"_b{one.batch}"
        for name, part in (("ttft", "first_s"), ("itl", "gap_s")):
            ours, theirs = ([getattr(pace, part) for pace in side] for side in (one.served, one.direct))
            figures[f"added_{name}_ms_p50{suffix}"] = median_difference_ms(ours, theirs)
        ratio = ratio_of([pace.tok_s for pace in one.served], [pace.tok_s for pace in one.direct])
        figures["tok_s_ratio" if one.batch == 32 else f"tok_s_ratio_b{one.batch}"] = ratio.median
        figures[f"engine_idle_share_b{one.batch}"] = one.idle_share
    figures |= {
        "streams": float(held.streams - held.failures),
        "streams_refused": float(held.failures),
        "streams_opened_s": held.opened_s,
        "streams_completed_s": held.completed_s,
        "streams_first_token_s_p50": held.first_token_s,
        "peak_rss_mb_gateway": held.peak_rss_mb,
        "kb_per_stream_gateway": held.kb_per_stream,
    }
    failures = held.failures + sum(one.failures for one in compared)
    notes = [f"the first stream that failed: {held.error}"] if held.error else []
    return Outcome(figures, failures, (_paces(compared),), notes)


def _paces(compared: Sequence[_Compared]) -> Table:
    rows = [
        (one.batch, turn + 1, name, pace.first_s * 1e3, pace.gap_s * 1e3, pace.tok_s)
        for one in compared
        for turn in range(len(one.served))
        for name, pace in (("served", one.served[turn]), ("direct", one.direct[turn]))
    ]
    return Table("by alternation", ("batch", "turn", "side", "first ms", "gap ms", "tok/s"), rows)
