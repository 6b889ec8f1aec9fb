"""`python -m bench ladder`: each rung of the ladder for full memory switched off in turn, live.

Two workers with little KV, all requests at once, packed onto as few workers as will take them; some requests
come again with the same beginning, and some are longer than one worker's KV. What a rung is worth is what is
lost without it: tokens a second, time to the end, requests that nobody could serve.
"""

import asyncio
import statistics
import time
from argparse import ArgumentParser
from typing import Any

from bench.context import Context
from bench.engine.checkpoint import vocabulary
from bench.http_load import Answer, Target, complete_all
from bench.ladder.variants import VARIANTS, Variant
from bench.latencies import percentile
from bench.outcome import Outcome, Table
from bench.overhead.stack import Stack, start
from bench.provenance import ROOT
from shared.errors import InternalError

KV_BLOCKS = 80
BLOCK_TOKENS = 16
WORKERS = 2
MAX_SEQUENCES = 32
PROMPT_TOKENS, ANSWER_TOKENS = (40, 200), (80, 240)
COMMON_TOKENS = 96
"""That every other prompt has in common."""
LONG_PROMPT_TOKENS, LONG_ANSWER_TOKENS = KV_BLOCKS * BLOCK_TOKENS, 60
_DEADLINE_S = 40.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, help="at once [48; --quick 16]")
    parser.add_argument("--long", type=int, default=1, help="longer than one worker's KV [%(default)s]")
    parser.add_argument("--rounds", type=int, help="of the same requests [2; --quick 1]")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=names)


def run(context: Context) -> Outcome:
    """Raises InternalError when a stack does not start."""
    chosen = [variant for variant in VARIANTS if variant.name in context.arguments.variants]
    rows: dict[str, dict[str, float]] = {}
    with context.progress("variants", len(chosen)) as progress:
        for variant in chosen:
            progress.advance(0, now=variant.name)
            rows[variant.name] = _measure(context, variant)
            context.record({"variant": variant.name, **rows[variant.name]}, file="variants.jsonl")
            progress.advance(1)
    figures = {f"{name}_{variant}": value for variant, row in rows.items() for name, value in row.items()}
    for variant in chosen:
        base = rows.get(variant.against)
        if base is not None and variant.name != variant.against:
            figures[f"speed_of_{variant.name}"] = rows[variant.name]["tokens_per_s"] / base["tokens_per_s"]
    headline = [name for name in figures if name.startswith(("tokens_per_s", "unserved", "speed_of"))]
    notes = [
        f"{WORKERS} workers of {KV_BLOCKS} blocks; {context.arguments.long} requests are longer than that",
        "speed_of: tokens a second against the whole ladder (expand_only: against recompute_only)",
        "unserved: refused because no worker can hold them, or failed",
    ]
    return Outcome(figures, 0, [_table(rows)], notes, headline=headline)


def _measure(context: Context, variant: Variant) -> dict[str, float]:
    model = ROOT / "models" / "tiny_chat"
    folder = context.run_dir.resolve() / f"stack-{variant.name}"
    settings: dict[str, object] = {
        "placement.policy": "best_fit",
        "worker.cores": "[]",
        "worker.block_tokens": BLOCK_TOKENS,
        **variant.settings,
    }
    stack = start(model, 0, KV_BLOCKS, MAX_SEQUENCES, folder, settings, WORKERS)
    try:
        return _load(context, stack)
    finally:
        stack.side.end()


def _load(context: Context, stack: Stack) -> dict[str, float]:
    bodies = _bodies(context, vocabulary(ROOT / "models" / "tiny_chat"))
    warm = asyncio.run(complete_all(stack.target, bodies[:2], _DEADLINE_S))
    if not any(answer.ok for answer in warm):
        raise InternalError("a stack does not serve")
    answers, took_s = asyncio.run(_rounds(context, stack.target, bodies))
    done = [answer for answer in answers if answer.ok]
    ends_s = [answer.ended_s - answer.sent_s for answer in done]
    told = stack.details("queued")
    return {
        "tokens_per_s": sum(answer.completion_tokens for answer in done) / took_s,
        "end_s_mean": statistics.fmean(ends_s) if ends_s else 0.0,
        "end_s_p95": percentile(ends_s, 95) if ends_s else 0.0,
        "unserved": float(len(answers) - len(done)),
        "moved": float(told.get("moved", 0)),
        **{name: float(count) for name, count in told.items() if name.startswith("relief_")},
    }


async def _rounds(
    context: Context, target: Target, bodies: list[dict[str, Any]]
) -> tuple[list[Answer], float]:
    answers: list[Answer] = []
    began_s = time.perf_counter()
    for _ in range(context.arguments.rounds or (1 if context.quick else 2)):
        answers += await complete_all(target, bodies, _DEADLINE_S)
    return answers, time.perf_counter() - began_s


def _bodies(context: Context, tokens: int) -> list[dict[str, Any]]:
    """The same for every variant."""
    dice = context.random("requests")

    def drawn(count: int) -> list[int]:
        return [dice.randrange(100, tokens - 1) for _ in range(count)]

    common = drawn(COMMON_TOKENS)
    count = context.arguments.requests or (16 if context.quick else 48)
    sizes = [(dice.randint(*PROMPT_TOKENS), dice.randint(*ANSWER_TOKENS)) for _ in range(count)]
    prompts = [((common if at % 2 else []) + drawn(size), limit) for at, (size, limit) in enumerate(sizes)]
    prompts += [(drawn(LONG_PROMPT_TOKENS), LONG_ANSWER_TOKENS) for _ in range(context.arguments.long)]
    return [
        {"prompt": prompt, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        for prompt, limit in prompts
    ]


def _table(rows: dict[str, dict[str, float]]) -> Table:
    columns = ("variant", "tok/s", "mean end", "p95 end", "unserved", "moved", "decisions")
    lines = [
        (
            name,
            f"{row['tokens_per_s']:.0f}",
            f"{row['end_s_mean']:.2f} s",
            f"{row['end_s_p95']:.2f} s",
            int(row["unserved"]),
            int(row["moved"]),
            ", ".join(f"{key[7:]} {int(row[key])}" for key in sorted(row) if key.startswith("relief_")),
        )
        for name, row in rows.items()
    ]
    return Table("the ladder, one rung less each time", columns, lines)
