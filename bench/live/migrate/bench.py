"""`python -m bench migrate`: a hundred live migrations while clients read, and their effect on the clients.

Two workers have a steady load of greedy answers. Sequences are migrated in turn; the same requests ran before
without migrations.
"""

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.context import Context
from bench.kit.load import Answer, Target, complete_all, first_error, full_answer
from bench.kit.models import checkpoint, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import PLAIN, start_stack
from bench.kit.stats import percentile
from bench.live.migrate.mover import Mover, Pause, Watch, mover, watch
from services.placement.core.move_mode import ModeChoice
from shared.errors import InternalError
from shared.messages.moves import MoveMode, SequenceMoved

CHOICES: dict[str, ModeChoice] = {"kv": "kv", "tokens": "tokens", "adaptive": "adaptive", "cold": "tokens"}
MODES = tuple(CHOICES)
UNDER = ("load", "link", "busy")
LINK_BYTES_PER_S = 3e6
BUSY_PROMPTS = 3
BUSY_TOKENS = 600
WORKERS = 2
AT_ONCE = 16
PROMPT_TOKENS = (100, 700)
ANSWER_TOKENS = (200, 320)
KV_BLOCKS = 2048
LEAST_LEFT_TOKENS = 40
"""Answers with fewer tokens left are not migrated."""
_DEADLINE_S = 240.0
_EVERY_S = 0.03
_SETTLE_S = 1.0
HEADLINE = (
    "moves", "moves_failed", "gaps", "duplicates", "same_text_share", "pause_ms_p50", "pause_ms_p99",
    "step_ms_p50", "pause_over_step_ms_p50", "prepare_ms_p50", "pause_over_step_ms_p50_tokens",
    "prepare_ms_p50_tokens", "pause_over_step_ms_p50_cold",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="models/tiny_chat", help="folder, or random-100m [%(default)s]")
    parser.add_argument("--moves", type=int, help="in each mode [100, quick: 20]")
    parser.add_argument("--streams", type=int, default=AT_ONCE, help="answers at once [%(default)s]")
    parser.add_argument("--at-once", type=int, default=1, help="moves under way [%(default)s]")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["kv", "tokens", "cold"])
    parser.add_argument(
        "--under",
        nargs="+",
        choices=UNDER,
        default=["load"],
        help="load: the streams alone; link: fetching throttled, too; busy: prompts keep coming, too",
    )


@dataclass
class Measured:
    """Result of one mode."""

    mode: str
    under: str = "load"
    took_s: float = 0.0
    """Duration of all rounds with migrations."""
    tokens: int = 0
    pauses: list[Pause] = field(default_factory=list)
    done: list[SequenceMoved] = field(default_factory=list)
    failed: int = 0
    gaps: int = 0
    duplicates: int = 0
    answers: int = 0
    same: int = 0
    errors: int = 0


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an invalid model, InternalError if a stack does not serve."""
    model = checkpoint(context.arguments.model)
    count = context.arguments.moves or (20 if context.quick else 100)
    found = []
    pairs = [(mode, under) for under in context.arguments.under for mode in context.arguments.modes]
    with context.progress("moves", count * len(pairs)) as progress:
        for mode, under in pairs:
            progress.advance(0, now=f"{mode}, {under}")
            found.append(_measure(context, model, mode, under, count))
            progress.advance(count)
    figures: dict[str, float] = {}
    for one in found:
        figures |= _figures(one)
    failures = sum(one.errors + one.gaps + one.duplicates for one in found)
    notes = [
        "pause: from the old worker's last token that counted to the new one's first that was news",
        "step: between two tokens of the same sequence before its move, median",
        "cold: without a prefix cache, so that the target computes prompt and answer in the pause",
    ]
    headline = [name for name in HEADLINE if name in figures]
    return Outcome(figures, failures, [_table(found)], notes, headline=headline)


def _measure(context: Context, model: Path, mode: str, under: str, count: int) -> Measured:
    settings: dict[str, object] = {
        **PLAIN,
        "scheduler.policy": "kvasir",
        "scheduler.max_batch_sequences": 64,
        "worker.prefix_cache.enabled": mode != "cold",
        "worker.kv_blocks": KV_BLOCKS,
        "worker.cores": [],
    }
    if under == "link":
        settings["worker.transfer.link_bytes_per_s"] = LINK_BYTES_PER_S
    folder = context.run_dir.resolve() / f"stack-{mode}-{under}"
    with start_stack(folder, settings, model=model, workers=WORKERS) as stack:
        bodies = _bodies(context, vocabulary(model))
        return asyncio.run(_load(context, Measured(mode, under), stack.target, folder, bodies, count))


def _bodies(context: Context, tokens: int) -> list[dict[str, Any]]:
    dice = context.random("questions")
    return [
        full_answer(drawn_tokens(dice, tokens, dice.randint(*PROMPT_TOKENS)), dice.randint(*ANSWER_TOKENS))
        for _ in range(context.arguments.streams)
    ]


async def _load(
    context: Context,
    measured: Measured,
    target: Target,
    run_dir: Path,
    bodies: list[dict[str, Any]],
    count: int,
) -> Measured:
    """Run the requests once undisturbed, then in rounds with migrations until there are `count`."""
    undisturbed = await complete_all(target, bodies, _DEADLINE_S)
    if error := first_error(undisturbed):
        raise InternalError(f"a stack does not serve: {error}")
    deadline = asyncio.timeout(_DEADLINE_S)
    async with mover(run_dir, CHOICES[measured.mode]) as moving, watch(run_dir) as seen, deadline:
        while len(moving.done) < count:
            began_s = time.perf_counter()
            answers = asyncio.create_task(complete_all(target, bodies, _DEADLINE_S))
            others = asyncio.create_task(_disturb(context, target, measured.under, answers))
            await _move_while(answers, moving, count, context.arguments.at_once)
            _compare(measured, await answers, undisturbed, bodies)
            measured.took_s += time.perf_counter() - began_s
            await others
            await asyncio.sleep(_SETTLE_S)
        _account(context, measured, moving, seen)
    return measured


async def _disturb(
    context: Context, target: Target, under: str, answers: "asyncio.Task[list[Answer]]"
) -> None:
    """With `busy`, send new prompts while the answers run."""
    dice = context.random("prompts")
    while under == "busy" and not answers.done():
        prompts = [[dice.randrange(100, 1000) for _ in range(BUSY_TOKENS)] for _ in range(BUSY_PROMPTS)]
        bodies = [{"prompt": prompt, "max_tokens": 1, "temperature": 0} for prompt in prompts]
        await complete_all(target, bodies, _DEADLINE_S)


async def _move_while(answers: "asyncio.Task[list[Answer]]", moving: Mover, count: int, at_once: int) -> None:
    while not answers.done():
        if len(moving.done) < count and moving.under_way < at_once:
            await moving.move_one(least_left=LEAST_LEFT_TOKENS, least_generated=4)
        await asyncio.sleep(_EVERY_S)


def _compare(
    measured: Measured,
    answers: Sequence[Answer],
    undisturbed: Sequence[Answer],
    bodies: Sequence[dict[str, Any]],
) -> None:
    for answer, other, body in zip(answers, undisturbed, bodies, strict=True):
        measured.answers += 1
        measured.tokens += answer.completion_tokens
        measured.errors += not answer.ok
        measured.gaps += answer.ok and answer.completion_tokens < body["max_tokens"]
        measured.duplicates += answer.completion_tokens > body["max_tokens"]
        measured.same += answer.text == other.text


def _account(context: Context, measured: Measured, moving: Mover, seen: Watch) -> None:
    measured.done = moving.done
    measured.failed = len(moving.outcomes) - len(moving.done)
    for moved in moving.outcomes:
        pause = None if moved.reason else seen.pause(moved.ref.key, moved.ref.attempt)
        if pause is not None:
            measured.pauses.append(pause)
        context.record(
            {
                "mode": measured.mode,
                "under": measured.under,
                "moved_by": str(moved.mode),
                "moved_bytes": moved.moved_bytes,
                "ref": str(moved.ref),
                "reason": moved.reason,
                "rounds": moved.rounds,
                "rehearsed_tokens": moved.rehearsed_tokens,
                "prepare_s": moved.prepare_s,
                "pause_s": None if pause is None else pause.pause_s,
                "step_s": None if pause is None else pause.step_s,
            },
            file="moves.jsonl",
        )


def _figures(one: Measured) -> dict[str, float]:
    """Return the figures; those of mode `kv` have no suffix."""
    suffix = "" if one.mode == "kv" else f"_{one.mode}"
    suffix += "" if one.under == "load" else f"_{one.under}"
    return {f"{name}{suffix}": value for name, value in _plain(one).items()}


def _plain(one: Measured) -> dict[str, float]:
    found = {
        "moves": float(len(one.done)),
        "moves_failed": float(one.failed),
        "gaps": float(one.gaps),
        "duplicates": float(one.duplicates),
        "same_text_share": one.same / one.answers,
        "answer_tokens_per_s": one.tokens / one.took_s,
    }
    if one.pauses:
        pauses = [pause.pause_s * 1e3 for pause in one.pauses]
        steps = [pause.step_s * 1e3 for pause in one.pauses]
        beyond = [pause - step for pause, step in zip(pauses, steps, strict=True)]
        found |= {
            "pause_ms_p50": percentile(pauses, 50),
            "pause_ms_p99": percentile(pauses, 99),
            "step_ms_p50": percentile(steps, 50),
            "pause_over_step_ms_p50": percentile(beyond, 50),
        }
    if one.done:
        found["prepare_ms_p50"] = percentile([moved.prepare_s * 1e3 for moved in one.done], 50)
        found["rounds"] = fmean(moved.rounds for moved in one.done)
        found["by_kv_share"] = fmean(moved.mode is MoveMode.KV for moved in one.done)
    return found


def _table(found: Sequence[Measured]) -> Table:
    rows = []
    for one in found:
        figures = {name.partition("_ms_")[0]: value for name, value in _plain(one).items()}
        times = [figures.get(name) for name in ("prepare", "pause", "step")]
        same = f"{one.same} of {one.answers}"
        counts = (len(one.done), one.failed, one.gaps, one.duplicates, same, figures.get("by_kv_share"))
        rows.append((one.mode, one.under, *counts, *times, one.tokens / one.took_s))
    columns = (
        *("mode", "under", "moves", "failed", "gaps", "duplicates", "same text", "share by KV"),
        *("prepare ms, p50", "pause ms, p99", "step ms, p50", "tokens/s"),
    )
    return Table("migrations while clients read", columns, rows)
