"""`python -m bench chaos`: effect on clients of processes that die or hang under load, and other trouble.

Rounds of streams run on one stack with default settings: first undisturbed, then the same requests with one
fault or two in each round. A pause is the longest gap of a stream that ends after the fault.
"""

import asyncio
import contextlib
import shutil
import signal
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import orjson
import psutil
import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, Target, complete, complete_all, first_error, full_answer, insist
from bench.kit.load import answers as is_up
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import CACHE, LENDING, PIE, RELIEF, Settings, Stack, start_stack
from bench.kit.stats import percentile
from bench.live import bad_day, shadowing
from bench.live.growth import Growth
from bench.live.structured import fault_of
from shared.errors import InternalError
from shared.recorder import MOST_BATCHES, MOST_EVENTS

STREAMS, WORKERS, GATEWAYS = 8, 2, 2
_DEADLINE_S = 120.0
FROZEN_S = {"worker": 4.0, "gateway": 8.0}
"""Seconds of a freeze. A gateway is frozen for longer than the others' timeout, so they take over its
answers."""
_FULL_S, _FULL_BEFORE_S = 30.0, 22.0
"""Seconds for which the disk is full; the requests come after so many of them."""
_ROUNDS_PER_POISON = 25
_REST_S = 60.0
"""Timeout for the stack's recovery."""
_KINDS = ("worker", "scheduler", "placement", "predictor", "ledger", "gateway", "nats")
_SAMPLE_S = 20.0
_AT_ONCE = 64
"""Concurrent short requests that first fill the flight recorders of all processes. Until a recorder is
full, memory grows under any load."""
_STEPS, _ROWS = 40, 16
"""Then requests of this many steps, with this many rows per worker, until the recorder has only such
steps. They take half of a tight worker's KV."""
TIGHT: Settings = {
    **CACHE,
    **LENDING,
    **RELIEF,
    **PIE,
    "worker.kv_blocks": 96,
    "worker.lending.max_lent_fraction": 1,
    "worker.host_memory.mb": 260,
    "worker.host_memory.cache_share": 256 / 260,
    "worker.prefix_cache.disk_mb": 64,
    "placement.policy": "mell",
}
"""Two workers have about half of the memory that the requests need; one has less than the longest needs.
Pie has little, so blocks are borrowed as well."""
_FILLED: Settings = {"worker.kv_blocks": 512, "worker.host_memory.mb": 64}
"""With `--minutes`: little KV memory, since its first use counts as growth."""
LONG_TOKENS = 1300
"""Prompt tokens of the longest request; with its answer it exceeds the 1,440 tokens beside Pie's buffers."""
_PROMPTS, _HANDED_OVER = (20, 80, 300), (600, 1500, 2400)
"""Prompt tokens; those with `--roles` are worth a hand-over."""
_LOST_LOANS = "borrowed blocks lost"
_EVENTS = {
    "borrowed": "blocks borrowed from the other worker",
    _LOST_LOANS: "borrowed blocks lost with their lender",
    "relief": "relief chosen where memory ran out",
    "move": "running answers moved",
}
"""Log events that show a mechanism at work."""
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["glad", "sad", "calm"]},
        },
        "required": ["name", "age", "mood"],
        "additionalProperties": False,
    },
    "minItems": 10,
    "maxItems": 14,
}
"""Schema of constrained answers."""


@dataclass(frozen=True)
class Fault:
    """A fault of one or two processes, which are killed, or of none."""

    victims: tuple[str, ...] = ()
    way: str = ""
    """Empty: only killed. `frozen`: stopped for a while. `hang`: stopped for ever. `files`: killed when all
    files of the run directory were deleted. `full`: the disk is full. `poison`: see `bad_day`."""

    @property
    def kind(self) -> str:
        """Name of the fault in the figures."""
        names = {victim.partition("-")[0] for victim in self.victims}
        if len(self.victims) > 1:
            return "pair"
        return f"frozen_{names.pop()}" if self.way == "frozen" else self.way or names.pop()


@dataclass
class Seen:
    """Results of all rounds."""

    requests: int = 0
    lost: int = 0
    duplicated: int = 0
    """Answers with too many tokens."""
    changed: int = 0
    invalid: int = 0
    """Answers that violate their schema."""
    poisoned_others_lost: int = 0
    """Lost answers of rounds with a poisoned request."""
    pauses_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Longest pause of each stream that was running at the fault, by kind of fault."""

    def take(
        self,
        fault: Fault | None,
        at_s: float,
        answers: Sequence[Answer],
        wanted: Sequence[Answer],
        bodies: Sequence[dict[str, Any]],
    ) -> None:
        """Add the answers of one round; without a fault no pauses."""
        for answer, expected, body in zip(answers, wanted, bodies, strict=True):
            self.requests += 1
            if not answer.ok or answer.completion_tokens < expected.completion_tokens:
                self.lost += 1
                self.poisoned_others_lost += fault is not None and fault.way == "poison"
                continue
            self.duplicated += answer.completion_tokens > expected.completion_tokens
            choices = range(body.get("n", 1))
            self.changed += any(answer.text_of(each) != expected.text_of(each) for each in choices)
            self.invalid += "guided_json" in body and bool(fault_of(answer, body["guided_json"]))
            if (
                fault is not None
                and len(answer.event_s) > 1
                and answer.event_s[0] < at_s < answer.event_s[-1]
            ):
                self.pauses_s[fault.kind].append(longest_pause_s(answer.event_s, at_s))


def longest_pause_s(event_s: Sequence[float], at_s: float) -> float:
    """Return the longest gap between two events that ends after `at_s`."""
    return max(after - before for before, after in pairwise(event_s) if after > at_s)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--tight", action="store_true", help="every mechanism on, and short memory")
    add("--roles", metavar="SPLIT", help="of the workers, such as prefill,decode,decode")
    add("--faults", type=int, help="of them [60; --quick 6]")
    add(
        "--part",
        choices=("faults", "shadow"),
        default="faults",
        help="shadow: a worker dies under 4k tokens of context, with copies of its KV and without, "
        "--faults times each [%(default)s]",
    )
    add("--minutes", type=float, default=0.0, help="so long of one-off requests: what grows? [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if a stack does not recover, or fails undisturbed."""
    if context.arguments.part == "shadow":
        return shadowing.run(context)
    count = context.arguments.faults or (6 if context.quick else 60)
    dice, seen, growth = context.random("faults"), Seen(), Growth()
    is_tight, roles = context.arguments.tight, context.arguments.roles
    workers = len(roles.split(",")) if roles else WORKERS
    bodies = drawn_bodies(
        context.random("requests"), LONG_TOKENS if is_tight else 0, _HANDED_OVER if roles else _PROMPTS
    )
    settings = _tight(context.run_dir / "disk") if is_tight else {}
    settings = {**settings, "placement.roles": roles} if roles else settings
    if context.arguments.minutes:
        settings = {**_FILLED, **settings, "gateway.stored_responses": str(context.run_dir / "responses.db")}
    with ExitStack() as running:
        disk = running.enter_context(bad_day.small_disk(context.run_dir / "small"))
        poisons = not is_tight and not roles  # Elsewhere no request is long enough.
        faults = drawn_faults(dice, count, workers, fills=disk is not None, poisons=poisons)
        run_dir = (disk or context.run_dir) / "stack"
        stack = running.enter_context(start_stack(run_dir, settings, workers=workers, gateways=GATEWAYS))
        uvloop.run(_until_known(stack.target, bodies[0]))
        wanted = uvloop.run(complete_all(stack.target, bodies, _DEADLINE_S))
        if not all(answer.ok for answer in wanted):
            raise InternalError(f"not every answer came undisturbed: {first_error(wanted)}")
        with context.progress("faults", count) as bar:
            for number, fault in enumerate(faults):
                bar.advance(0, now=" and ".join((fault.way or "killed", *fault.victims)))
                name = f"round-{number}"
                asked = bodies if is_tight else [body | {"cache_salt": name} for body in bodies]
                disturbed = _disturbed(stack, asked, fault, dice.uniform(0.2, 0.8), name, seen)
                at_s, answers = uvloop.run(disturbed)
                seen.take(fault, at_s, answers, wanted, bodies)
                _record(context, fault, answers, at_s)
                _until_whole(stack)
                bar.advance()
        lost_loans = -_events(run_dir / "logs")[_LOST_LOANS]
        _serve_on(context, stack, workers, bodies, wanted, seen, growth)
        lost_loans += _events(run_dir / "logs")[_LOST_LOANS]
        handed_over = {"hand_overs": stack.details("hand_overs")["hand_overs"]} if roles else {}
    worked = [work_table(run_dir / "logs")] if is_tight else []
    if grown := growth.rows():
        worked.append(Table("What grows most", ("what", "where", "from → to", "per hour"), grown))
    frozen = ", ".join(f"a {kind} for {frozen_s:g} s" for kind, frozen_s in FROZEN_S.items())
    loans = {"loans_lost": lost_loans} if grown else {}
    return Outcome(
        _figures(seen, count) | handed_over | growth.figures() | loans,
        seen.lost + seen.duplicated + seen.changed + seen.invalid,
        tables=[_table(seen), *worked],
        notes=[
            *([_TIGHT_NOTE] if is_tight else []),
            f"workers: {roles or workers}; {GATEWAYS} gateways, {STREAMS} requests at once: greedy, with a "
            "seed, held to a JSON schema, and of three choices; the same undisturbed before",
            "a client whose connection breaks asks again with the same Idempotency-Key",
            *([] if is_tight else ["no round finds KV of an earlier one: what is lost is computed again"]),
            "pause: the longest gap of a stream that was under way when the fault happened, in seconds",
            f"frozen: SIGSTOP, {frozen}; hang: SIGSTOP for ever; the others: SIGKILL; pair: two at once",
        ],
    )


_TIGHT_NOTE = (
    "tight: the prefix cache with a disk, lending, Pie, relief and moves are on, and workers have memory for"
    " half of the requests; a pause may be a wait for memory"
)


def _tight(disk: Path) -> Settings:
    """Return the tight settings, with a new folder for the workers' disk tier."""
    disk.mkdir(parents=True, exist_ok=True)
    return {**TIGHT, "worker.prefix_cache.disk_path": str(disk)}


def work_table(logs: Path) -> Table:
    """Return how often each mechanism was at work, from the logs."""
    found = _events(logs)
    return Table("Mechanisms", ("what", "times"), [(said, found[event]) for event, said in _EVENTS.items()])


def _events(logs: Path) -> Counter[str]:
    """Count the events in the logs."""
    found = Counter[str]()
    for log in logs.glob("*.log"):
        for line in log.read_bytes().splitlines():
            try:
                told = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # From a process killed while it wrote.
            if isinstance(told, dict):
                found[str(told.get("event"))] += 1
    return found


def _serve_on(
    context: Context,
    stack: Stack,
    workers: int,
    bodies: Sequence[dict[str, Any]],
    wanted: Sequence[Answer],
    seen: Seen,
    growth: Growth,
) -> None:
    """Serve the same requests and one-offs for `--minutes`, and sample what grows."""
    dice = context.random("one-offs")
    if context.arguments.minutes:
        _serve_short(context, stack, MOST_EVENTS, _AT_ONCE, 1)
        rows = _ROWS * workers
        _serve_short(context, stack, MOST_BATCHES // _STEPS * rows, rows, _STEPS)
    began_s = time.monotonic()
    until_s = began_s + 60.0 * context.arguments.minutes
    while time.monotonic() < until_s:
        answering = complete_all(stack.target, bodies, _DEADLINE_S)
        sending = bad_day.one_offs(stack.run_dir, stack.target.model, dice, _SAMPLE_S)
        answers, failed = uvloop.run(_together(answering, sending))
        seen.take(None, 0.0, answers, wanted, bodies)
        seen.lost += failed
        time.sleep(1.0)
        growth.take(stack, time.monotonic() - began_s)
        for row in growth.last():
            context.record(row, file="growth.jsonl")


async def _together(answering: Awaitable[list[Answer]], sending: Awaitable[int]) -> tuple[list[Answer], int]:
    return await asyncio.gather(answering, sending)


def _serve_short(context: Context, stack: Stack, count: int, at_once: int, tokens: int) -> None:
    """Serve `count` requests with answers of `tokens` tokens. Raises InternalError if one fails."""
    bodies = [full_answer([token], tokens) for token in range(1, at_once + 1)]
    with context.progress(f"first, requests of {tokens} tokens", count) as bar:
        for _ in range(count // at_once):
            answers = uvloop.run(complete_all(stack.target, bodies, _DEADLINE_S))
            if not all(answer.ok for answer in answers):
                raise InternalError(f"short requests failed: {first_error(answers)}")
            bar.advance(len(answers))


def drawn_faults(
    dice: Random, count: int, workers: int = WORKERS, *, fills: bool = False, poisons: bool = False
) -> list[Fault]:
    """Return random faults, every kind equally often, with pairs, freezes, hangs and deleted files. `fills`:
    the disk can be full. `poisons`: one request of 200 kills workers."""
    instances = {kind: [kind if kind == "nats" else f"{kind}-0"] for kind in _KINDS}
    instances["worker"] = [f"worker-{index}" for index in range(workers)]
    instances["gateway"] = [f"gateway-{index}" for index in range(GATEWAYS)]
    ways = [(kind, "") for kind in _KINDS] + [(kind, "frozen") for kind in FROZEN_S] + [("", "pair")]
    ways += [(kind, "hang") for kind in _KINDS] + [("", "files")] + ([("", "full")] if fills else [])
    poisoned = range(min(count, _ROUNDS_PER_POISON) // 2, count, _ROUNDS_PER_POISON) if poisons else ()
    first, found = dice.randrange(len(ways)) if count < len(ways) else 0, []
    for number in range(first, first + count - len(poisoned)):
        kind, way = ways[number % len(ways)]
        kinds = dice.sample(_KINDS, 2 if way == "pair" else 1) if not kind else [kind]
        victims = () if way == "full" else tuple(dice.choice(instances[each]) for each in kinds)
        found.append(Fault(victims, "" if way == "pair" else way))
    dice.shuffle(found)
    for at in poisoned:
        found.insert(at, Fault(way="poison"))
    return found


def drawn_bodies(dice: Random, long_tokens: int = 0, sizes: Sequence[int] = _PROMPTS) -> list[dict[str, Any]]:
    """Return greedy, seeded, constrained and multi-choice requests in turn, with prompts of `sizes` tokens.
    The first has `long_tokens` if that is not 0."""
    ids = vocabulary(TINY_CHAT)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 400, "ignore_eos": True},
        {"temperature": 0.8, "max_tokens": 400, "ignore_eos": True},
        {"temperature": 0.8, "max_tokens": 400, "guided_json": SCHEMA},
        {"temperature": 0.8, "max_tokens": 150, "ignore_eos": True, "n": 3},
    ]
    lengths = [dice.choice(sizes) for _ in range(STREAMS)]
    lengths[0] = long_tokens or lengths[0]
    return [
        {"prompt": drawn_tokens(dice, ids, length), "seed": number} | kinds[number % len(kinds)]
        for number, length in enumerate(lengths)
    ]


async def _until_known(target: Target, body: dict[str, Any]) -> None:
    """Wait until the longest request is accepted: workers know the lendable memory. Raises InternalError
    on a timeout."""
    until_s = time.monotonic() + _REST_S
    while not (answer := await complete(target, body, _DEADLINE_S)).ok:
        if time.monotonic() > until_s:
            raise InternalError(f"the longest request is refused: {answer.error}")
        await asyncio.sleep(0.5)


async def _disturbed(
    stack: Stack, bodies: Sequence[dict[str, Any]], fault: Fault, after_s: float, name: str, seen: Seen
) -> tuple[float, list[Answer]]:
    """Return the time of the fault, and the answers."""
    target: Target = stack.target
    async with asyncio.TaskGroup() as tasks:
        if fault.way == "full":
            tasks.create_task(bad_day.filled(stack.run_dir.parent, _FULL_S))
            await asyncio.sleep(_FULL_BEFORE_S)
        asking = [insist(target, body, f"{name}-{at}", _DEADLINE_S) for at, body in enumerate(bodies)]
        answers = [tasks.create_task(one) for one in asking]
        await asyncio.sleep(after_s)
        at_s = time.perf_counter()
        if fault.way == "poison":
            said, _ = await bad_day.poisoned(stack.run_dir, {"model": target.model, "prompt": name})
            seen.lost += "worker_killed" not in said
        await _hit(stack, fault)
    return at_s, [one.result() for one in answers]


async def _hit(stack: Stack, fault: Fault) -> None:
    """Stop or kill the victims."""
    victims = [stack.process(name) for name in fault.victims]
    if fault.way == "files":
        for path in list(stack.run_dir.iterdir()):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for victim in victims:
        victim.send_signal(signal.SIGSTOP if fault.way in ("frozen", "hang") else signal.SIGKILL)
    if fault.way == "frozen":
        await asyncio.sleep(FROZEN_S[fault.victims[0].partition("-")[0]])
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # It was replaced as one that hangs.
                victim.send_signal(signal.SIGCONT)


def _until_whole(stack: Stack) -> None:
    """Wait until every process runs and the stack is ready. Raises InternalError on a timeout."""
    stack.until(lambda: stack.is_whole() and is_up(stack.target, "/ready"), _REST_S)
    time.sleep(1.0)  # The next fault needs an idle stack.


def _figures(seen: Seen, faults: int) -> dict[str, float]:
    figures: dict[str, float] = {
        "requests": seen.requests,
        "faults": faults,
        "lost": seen.lost,
        "duplicated": seen.duplicated,
        "changed": seen.changed,
        "invalid": seen.invalid,
        "poisoned_others_lost": seen.poisoned_others_lost,
    }
    for kind, pauses_s in sorted(seen.pauses_s.items()):
        figures[f"pause_p50_s_{kind}"] = percentile(pauses_s, 50)
        figures[f"pause_p99_s_{kind}"] = percentile(pauses_s, 99)
    if hung_s := seen.pauses_s.get("hang"):
        figures["pause_hang_p99_s"] = percentile(hung_s, 99)
    return figures


def _table(seen: Seen) -> Table:
    rows = [
        (kind, len(pauses_s), percentile(pauses_s, 50), percentile(pauses_s, 99), max(pauses_s))
        for kind, pauses_s in sorted(seen.pauses_s.items())
    ]
    return Table("Pauses by fault", ("fault", "streams", "p50 s", "p99 s", "longest s"), rows)


def _record(context: Context, fault: Fault, answers: Sequence[Answer], at_s: float) -> None:
    for number, answer in enumerate(answers):
        gaps = [after - before for before, after in pairwise(answer.event_s) if after > at_s]
        told = {"victims": fault.victims, "kind": fault.kind, "request": number, "error": answer.error}
        context.record({**told, "tokens": answer.completion_tokens, "pause_s": max(gaps, default=0.0)})
