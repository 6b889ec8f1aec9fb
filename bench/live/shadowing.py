"""Part `shadow` of `bench chaos`: the pause when a worker dies during an answer with long context.

It compares workers with and without copies of the KV at another worker. One answer at a time runs on two
workers of a model with an expensive prompt of 4,000 tokens; its worker is killed partway.
"""

import asyncio
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, complete, complete_all, full_answer
from bench.kit.models import checkpoint, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, start_stack
from bench.kit.stats import Work, alternate, percentile, ratio_of_wholes, with_interval
from shared.errors import InternalError

MODEL, PROMPT_TOKENS, ANSWER_TOKENS = "random-100m", 3700, 240
_LOAD = (4, 1200, 120)
"""(concurrent answers, prompt tokens, answer tokens) of the load without kills."""
_COMMON: Mapping[str, object] = {
    "worker.kv_blocks": 1100,
    "worker.host_memory.mb": 2048,
    "worker.host_memory.cache_share": 0.5,
}
SIDES: Mapping[str, Mapping[str, object]] = {
    "shadow": _COMMON,
    "unshadowed": {**_COMMON, "scheduler.shadow_from_s": 0},
}
_DEADLINE_S, _REST_S = 300.0, 60.0
_KILL_BETWEEN = (0.5, 0.9)
"""Share of the answer's events before the kill; copying has had half of that time."""


@dataclass
class Pauses:
    """Pauses of one side."""

    pauses_s: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Pauses in steps of the same answer."""
    lost: int = 0
    changed: int = 0

    def take(self, answer: Answer, killed_s: float, wanted: str) -> None:
        """Add one answer; its events before the kill give its step time."""
        if not answer.ok or answer.completion_tokens != ANSWER_TOKENS:
            self.lost += 1
            return
        self.changed += answer.text != wanted
        gaps = [(after, after - before) for before, after in pairwise(answer.event_s)]
        before_s = [gap for at_s, gap in gaps if at_s < killed_s]
        after_s = [gap for at_s, gap in gaps if at_s >= killed_s]
        if before_s and after_s:
            self.pauses_s.append(max(after_s))
            self.steps.append(max(after_s) / statistics.median(before_s))


def run(context: Context) -> Outcome:
    """Run the part. Raises InternalError if a stack does not recover."""
    kills = context.arguments.faults or (2 if context.quick else 20)
    turns = 2 if context.quick else 12
    model = checkpoint(MODEL)
    dice, ids = context.random("shadow"), vocabulary(model)
    seen = {name: Pauses() for name in SIDES}
    found: dict[str, float] = {}
    with (
        start_stack(context.run_dir / "shadow", SIDES["shadow"], model=model, workers=2) as shadowing,
        start_stack(context.run_dir / "unshadowed", SIDES["unshadowed"], model=model, workers=2) as plain,
    ):
        stacks = {"shadow": shadowing, "unshadowed": plain}
        found |= _cost(context, stacks, dice, ids, turns)
        with context.progress("kills", kills * len(SIDES)) as bar:
            for number in range(kills):
                body = full_answer(drawn_tokens(dice, ids, PROMPT_TOKENS), ANSWER_TOKENS)
                at = round(ANSWER_TOKENS * dice.uniform(*_KILL_BETWEEN))
                wanted = ""
                for name in ("unshadowed", "shadow") if number % 2 else ("shadow", "unshadowed"):
                    killed_s, answer = uvloop.run(_killed(stacks[name], body, at))
                    wanted = wanted or answer.text
                    seen[name].take(answer, killed_s, wanted)
                    context.record({"side": name, "number": number, "pauses_s": seen[name].pauses_s[-1:]})
                    _until_two(stacks[name])
                    bar.advance()
        found["shadow_hit_blocks"] = float(_sum(shadowing, "shadows_used"))
    found |= figures(seen)
    failures = sum(one.lost + one.changed for one in seen.values())
    return Outcome(
        found,
        failures,
        tables=[table(seen)],
        notes=[
            f"{MODEL}, {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens, two workers; SIGKILL in the answer's middle",
            "steps: the pause over the median gap of the same answer before",
            "shadow_throughput: tokens/s with copies over without while nothing dies",
        ],
    )


def figures(seen: Mapping[str, Pauses]) -> dict[str, float]:
    """Return the figures by side, without sides that have no pause."""
    found: dict[str, float] = {}
    for name, one in seen.items():
        found |= {f"{name}_lost": one.lost, f"{name}_changed": one.changed}
        if one.pauses_s:
            for percent in (50, 99):
                found[f"pause_p{percent}_s_{name}_4k"] = percentile(one.pauses_s, percent)
                found[f"pause_p{percent}_steps_{name}_4k"] = percentile(one.steps, percent)
    return found


def table(seen: Mapping[str, Pauses]) -> Table:
    rows = [
        (
            name,
            len(one.pauses_s),
            *(percentile(each, at) for each in (one.pauses_s, one.steps) for at in (50, 99)),
        )
        for name, one in seen.items()
        if one.pauses_s
    ]
    return Table("Pauses at 4k context", ("side", "kills", "p50 s", "p99 s", "p50 steps", "p99 steps"), rows)


def _cost(
    context: Context, stacks: Mapping[str, Stack], dice: Random, ids: int, turns: int
) -> dict[str, float]:
    """Return tokens per second of the two sides in turns, each with new prompts."""
    count, prompt_tokens, tokens = _LOAD

    def side(stack: Stack, seed: int) -> Callable[[], Work]:
        own = Random(seed)
        return lambda: _served(
            stack, [full_answer(drawn_tokens(own, ids, prompt_tokens), tokens) for _ in range(count)]
        )

    seed = dice.randrange(1 << 30)
    sides = [side(stacks["shadow"], seed), side(stacks["unshadowed"], seed)]
    for one in sides:
        one()
    ours, theirs = alternate(sides, turns)
    for turn, (one_work, other) in enumerate(zip(ours, theirs, strict=True)):
        context.record({"turn": turn, "shadow": one_work, "unshadowed": other})
    found = with_interval("shadow_throughput", ours, theirs, ratio_of_wholes)
    return found | {"shadow_copied_blocks": float(_sum(stacks["shadow"], "shadow_blocks_kept"))}


def _served(stack: Stack, bodies: Sequence[dict[str, Any]]) -> Work:
    began_s = time.perf_counter()
    answers = uvloop.run(complete_all(stack.target, bodies, _DEADLINE_S))
    took_s = time.perf_counter() - began_s
    failed = [answer.error for answer in answers if not answer.ok]
    if failed:
        raise InternalError(f"{len(failed)} of {len(bodies)} answers failed: {failed[0]}")
    return sum(answer.completion_tokens for answer in answers), took_s


async def _killed(stack: Stack, body: dict[str, Any], at: int) -> tuple[float, Answer]:
    """Return when the worker was killed, and the answer. Raises InternalError if it ended before."""
    answer = Answer(time.perf_counter())
    asking = asyncio.ensure_future(complete(stack.target, body, _DEADLINE_S, answer))
    before_s: dict[str, float] | None = None
    while not asking.done():
        if len(answer.event_s) >= at // 2 and before_s is None:
            before_s = _worker_cpu_s(stack)
        if len(answer.event_s) >= at and before_s is not None:
            used_s = {name: now_s - before_s[name] for name, now_s in _worker_cpu_s(stack).items()}
            killed_s = time.perf_counter()
            stack.process(max(used_s, key=lambda name: used_s[name])).send_signal(signal.SIGKILL)
            return killed_s, await asking
        await asyncio.sleep(0.01)
    raise InternalError(f"the answer was over before its worker could be killed: {answer.error}")


def _worker_cpu_s(stack: Stack) -> dict[str, float]:
    """Return CPU seconds by worker. Only the worker with the answer computes."""
    used_s = stack.cpu_s()
    return {name.removesuffix(" engine"): used_s[name] for name in used_s if name.endswith(" engine")}


def _sum(stack: Stack, what: str) -> int:
    workers = [row for row in stack.services() if row["service"] == "worker"]
    return sum(int(row["details"].get(what, 0)) for row in workers)


def _until_two(stack: Stack) -> None:
    """Wait until both workers run. Raises InternalError on a timeout."""
    stack.until(lambda: sum(row["service"] == "worker" for row in stack.services()) == 2, _REST_S)
    time.sleep(1.0)
