"""`python -m bench chaos`: processes of a stack are killed and frozen under streams; what do clients notice?

Rounds of streams on one stack with default settings: first undisturbed, then the same requests again and
again, each time with a fault in their middle, or with two at once. Answers are compared with the undisturbed
ones: a request of temperature 0, or with a seed, has one answer, whatever dies. Pauses are the longest gap
between two texts of a stream in whose time the fault fell.
"""

import asyncio
import signal
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import psutil
import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, Target, complete_all
from bench.kit.load import answers as is_up
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, start_stack
from bench.kit.stats import percentile
from shared.errors import InternalError

STREAMS, WORKERS = 8, 2
_DEADLINE_S = 120.0
_FROZEN_S = 4.0
_REST_S = 20.0
"""At most: for what was killed to be there again."""
_KINDS = ("worker", "scheduler", "placement", "predictor", "ledger", "nats")


@dataclass(frozen=True)
class Fault:
    """What happens to whom, at one moment."""

    victims: tuple[str, ...]
    is_freeze: bool = False

    @property
    def kind(self) -> str:
        """Under which figure it counts."""
        names = {victim.partition("-")[0] for victim in self.victims}
        if len(self.victims) > 1:
            return "pair"
        return f"frozen_{names.pop()}" if self.is_freeze else names.pop()


@dataclass
class Seen:
    """Of all rounds."""

    requests: int = 0
    lost: int = 0
    duplicated: int = 0
    """More tokens than were asked for."""
    changed: int = 0
    pauses_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By kind of fault: the longest of each stream that was under way then."""

    def take(self, fault: Fault, at_s: float, answers: Sequence[Answer], wanted: Sequence[Answer]) -> None:
        """One round's."""
        for answer, expected in zip(answers, wanted, strict=True):
            self.requests += 1
            if not answer.ok or answer.completion_tokens < expected.completion_tokens:
                self.lost += 1
                continue
            self.duplicated += answer.completion_tokens > expected.completion_tokens
            self.changed += answer.text != expected.text
            if len(answer.event_s) > 1 and answer.event_s[0] < at_s < answer.event_s[-1]:
                self.pauses_s[fault.kind].append(longest_pause_s(answer.event_s, at_s))


def longest_pause_s(event_s: Sequence[float], at_s: float) -> float:
    """The longest gap between two events that ends after `at_s`."""
    return max(after - before for before, after in pairwise(event_s) if after > at_s)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, help="of them [60; --quick 6]")


def run(context: Context) -> Outcome:
    """Raises InternalError where a stack does not recover, or serves nothing undisturbed."""
    count = context.arguments.faults or (6 if context.quick else 60)
    dice, seen = context.random("faults"), Seen()
    bodies = _bodies(context.random("requests"))
    faults = drawn_faults(dice, count)
    with start_stack(context.run_dir / "stack", {}, workers=WORKERS) as stack:
        wanted = uvloop.run(complete_all(stack.target, bodies, _DEADLINE_S))
        if not all(answer.ok for answer in wanted):
            raise InternalError("not every answer came undisturbed")
        with context.progress("faults", count) as bar:
            for fault in faults:
                bar.advance(0, now=" and ".join(fault.victims))
                at_s, answers = uvloop.run(_disturbed(stack, bodies, fault, dice.uniform(0.2, 0.8)))
                seen.take(fault, at_s, answers, wanted)
                _record(context, fault, answers, at_s)
                _until_whole(stack)
                bar.advance()
    return Outcome(
        _figures(seen, count),
        seen.lost + seen.duplicated + seen.changed,
        tables=[_table(seen)],
        notes=[
            f"{WORKERS} workers, {STREAMS} streams at once, half of them greedy, half with a seed; the same "
            "requests undisturbed before",
            "pause: the longest gap of a stream that was under way when the fault happened, in seconds",
            f"frozen: SIGSTOP for {_FROZEN_S:g} s; the others: SIGKILL; pair: two at once",
        ],
    )


def drawn_faults(dice: Random, count: int) -> list[Fault]:
    """Every kind as often as the others, pairs and freezes among them, in an order that is drawn."""
    instances = {kind: [kind if kind == "nats" else f"{kind}-0"] for kind in _KINDS}
    instances["worker"] = [f"worker-{index}" for index in range(WORKERS)]
    found = []
    for number in range(count):
        which = number % (len(_KINDS) + 2)
        if which < len(_KINDS):
            found.append(Fault((dice.choice(instances[_KINDS[which]]),)))
        elif which == len(_KINDS):
            found.append(Fault((dice.choice(instances["worker"]),), is_freeze=True))
        else:
            found.append(Fault(tuple(dice.choice(instances[kind]) for kind in dice.sample(_KINDS, 2))))
    dice.shuffle(found)
    return found


def _bodies(dice: Random) -> list[dict[str, Any]]:
    ids = vocabulary(TINY_CHAT)
    common = {"ignore_eos": True, "max_tokens": 400}
    return [
        {"prompt": drawn_tokens(dice, ids, dice.choice((20, 80, 300))), **common}
        | ({"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number})
        for number in range(STREAMS)
    ]


async def _disturbed(
    stack: Stack, bodies: Sequence[dict[str, Any]], fault: Fault, after_s: float
) -> tuple[float, list[Answer]]:
    """When it happened, and the answers."""
    target: Target = stack.target
    asking = asyncio.create_task(complete_all(target, bodies, _DEADLINE_S))
    await asyncio.sleep(after_s)
    victims = [stack.process(name) for name in fault.victims]
    at_s = time.perf_counter()
    for victim in victims:
        victim.send_signal(signal.SIGSTOP if fault.is_freeze else signal.SIGKILL)
    if fault.is_freeze:
        await asyncio.sleep(_FROZEN_S)
        for victim in victims:
            victim.send_signal(signal.SIGCONT)
    return at_s, await asking


def _until_whole(stack: Stack) -> None:
    """Every process is there again, and the stack ready. Raises InternalError when that takes too long."""
    until_s = time.monotonic() + _REST_S
    while time.monotonic() < until_s:
        try:
            if is_up(stack.target, "/ready") and stack.cpu_s():
                time.sleep(1.0)  # The next fault is to find it at rest.
                return
        except (psutil.NoSuchProcess, InternalError):
            pass
        time.sleep(0.1)
    raise InternalError(f"the stack was not whole again within {_REST_S:g} s")


def _figures(seen: Seen, faults: int) -> dict[str, float]:
    figures: dict[str, float] = {
        "requests": seen.requests,
        "faults": faults,
        "lost": seen.lost,
        "duplicated": seen.duplicated,
        "changed": seen.changed,
    }
    for kind, pauses_s in sorted(seen.pauses_s.items()):
        figures[f"pause_p50_s_{kind}"] = percentile(pauses_s, 50)
        figures[f"pause_p99_s_{kind}"] = percentile(pauses_s, 99)
    return figures


def _table(seen: Seen) -> Table:
    rows = [
        (
            kind,
            len(pauses_s),
            f"{percentile(pauses_s, 50):.2f} s",
            f"{percentile(pauses_s, 99):.2f} s",
            f"{max(pauses_s):.2f} s",
        )
        for kind, pauses_s in sorted(seen.pauses_s.items())
    ]
    return Table("Pauses by fault", ("fault", "streams", "p50", "p99", "longest"), rows)


def _record(context: Context, fault: Fault, answers: Sequence[Answer], at_s: float) -> None:
    for number, answer in enumerate(answers):
        gaps = [after - before for before, after in pairwise(answer.event_s) if after > at_s]
        told = {"victims": fault.victims, "kind": fault.kind, "request": number, "error": answer.error}
        context.record({**told, "tokens": answer.completion_tokens, "pause_s": max(gaps, default=0.0)})
