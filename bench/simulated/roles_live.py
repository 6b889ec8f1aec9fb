"""The live half of `bench fleet --roles --live`: hand-overs under load, and workers killed during them.

First times: a mixed and a split stack of workers that take a model's time but compute nothing (`--engine
simulated`) get the same requests in turns. Then texts: answers of a split stack with a real model are
compared with those of one worker. The same follows while a prefill or decode worker is killed under load.
"""

import asyncio
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from bench.kit.context import Context
from bench.kit.load import Answer, Target, complete, complete_all, first_error, full_answer
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, on_bus, start_stack
from bench.kit.stats import percentile
from services.placement.core.roles import BOTH, Role
from shared import subjects
from shared.bus import Handler, Listener
from shared.errors import InternalError
from shared.messages.moves import SequenceMoved
from shared.messages.plans import WorkerStepped

ROUNDS = 3
"""Rounds in which the sides take turns."""
STREAMS = 8
KILLED = (Role.PREFILL, Role.DECODE)
_SPLITS = {2: (1, 1), 3: (1, 2), 4: (2, 2)}
"""(prefill, decode) workers by total."""
_TIMED_WORKERS, _KILL_WORKERS = (2, 4), 3
_SHOWN = {
    "first token p50 s, both": "ttft_p50_s_both",
    "split": "ttft_p50_s_split",
    "later p50 s": "first_later_s_p50",
    "p90": "first_later_s_p90",
    "step s": "step_s",
    "requests": "requests",
    "hand-overs": "hand_overs",
    "copied after the prompt": "late_share",
    "taking s": "late_s_p50",
}
_TIMED: dict[str, object] = {"worker.engine": "simulated", "worker.kv_blocks": 960}
_TIMED_PROMPT, _TIMED_ANSWER = (400, 2000), (30, 60)
_EVERY_S = 0.6
"""Interval between requests, long enough that none waits for another's prefill."""
_PROMPT, _ANSWER = (600, 2400), (160, 320)
_KILL_WITHIN_S = 0.3
_DEADLINE_S, _REST_S, _CALM_S = 120.0, 40.0, 1.0

HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.SCHEDULER_MOVED, SequenceMoved, "on_moved"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
)


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if a stack does not serve, or does not recover from a kill."""
    kills = context.arguments.kills or (2 if context.quick else 20)
    requests = 12 if context.quick else 60
    folder = context.run_dir.resolve()
    figures: dict[str, float] = {}
    rows = []
    for workers in _TIMED_WORKERS[:1] if context.quick else _TIMED_WORKERS:
        context.say(f"first tokens, {workers} live workers")
        found = measure_times(
            folder / f"times-{workers}", workers, requests, context.random(f"times {workers}")
        )
        rows.append((workers, *(f"{found[name]:.3g}" for name in _SHOWN.values())))
        figures |= {f"live_{name}_w{workers}": found[name] for name in ("first_later_s_p50", "late_share")}
        figures[f"live_first_later_steps_w{workers}"] = found["first_later_s_p50"] / found["step_s"]
    times = Table("engine `simulated`, prompts that do not wait for each other", ("workers", *_SHOWN), rows)
    context.say(f"texts, and {kills} kills of each role, {_KILL_WORKERS} live workers")
    texts = measure_texts(folder / "texts", _KILL_WORKERS, kills, context.random("texts"))
    kinds = {"hand-overs alone": "calm", "killed for prompts": "prefill", "killed for answers": "decode"}
    compared: dict[str, Compared] = {label: texts[kind] for label, kind in kinds.items()}
    for kind, one in zip(("", "_prefill_killed", "_decode_killed"), compared.values(), strict=True):
        figures |= {
            f"live_gaps{kind}": one.lost,
            f"live_duplicates{kind}": one.duplicated,
            f"live_changed{kind}": one.changed,
        }
    figures |= {
        "live_hand_overs": texts["hand_overs_all"],
        "live_kills_in_mid_prompt": texts["prefill in the middle"],
        "live_kills_in_mid_answer": texts["decode in the middle"],
    }
    table = Table(
        f"{_KILL_WORKERS} live workers with a model, {split(_KILL_WORKERS)}, {STREAMS} streams at once",
        ("", "answers", "lost or short", "too long", "changed"),
        [(label, one.answers, one.lost, one.duplicated, one.changed) for label, one in compared.items()],
    )
    notes = [f"{kills} kills of each role; hand-overs alone: {texts['hand_overs']}, {texts['bytes']} bytes"]
    return Outcome(figures, sum(one.failures for one in compared.values()), [times, table], notes)


def split(workers: int) -> str:
    """Return `placement.roles` for `workers` workers. Raises KeyError if that split is not measured."""
    prefill, decode = _SPLITS[workers]
    return ",".join([Role.PREFILL] * prefill + [Role.DECODE] * decode)


@dataclass
class Watch:
    """Collects finished migrations and step reports."""

    moves: list[SequenceMoved] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    """Duration of decode-only steps."""
    _awaited: Collection[str] = ()
    _prompts: bool = False
    _found: asyncio.Future[str] | None = None

    def on_moved(self, moved: SequenceMoved) -> None:
        self.moves.append(moved)

    def on_stepped(self, event: WorkerStepped) -> None:
        if event.decoded_tokens and not event.prefilled_tokens and event.step_s:
            self.steps_s.append(event.step_s)
        does = event.prefilled_tokens if self._prompts else event.decoded_tokens
        if self._found and not self._found.done() and event.worker_id in self._awaited and does:
            self._found.set_result(event.worker_id)

    async def until_busy(self, workers: Collection[str], role: Role) -> str:
        """Wait for one of `workers` to prefill or decode, by `role`, and return it."""
        self._awaited, self._prompts = workers, role is Role.PREFILL
        self._found = asyncio.get_running_loop().create_future()
        return await self._found

    @property
    def done(self) -> list[SequenceMoved]:
        return [moved for moved in self.moves if not moved.reason]


@dataclass
class Compared:
    """Comparison of answers with those of an undisturbed worker."""

    answers: int = 0
    lost: int = 0
    """Gaps: an error, or fewer tokens than requested."""
    duplicated: int = 0
    """Answers with too many tokens."""
    changed: int = 0
    """Answers with a different text."""

    def take(self, answers: Sequence[Answer], wanted: Sequence[Answer]) -> None:
        for answer, expected in zip(answers, wanted, strict=True):
            self.answers += 1
            is_short = not answer.ok or answer.completion_tokens < expected.completion_tokens
            self.lost += is_short
            self.duplicated += answer.completion_tokens > expected.completion_tokens
            self.changed += not is_short and answer.text != expected.text

    @property
    def failures(self) -> int:
        return self.lost + self.duplicated + self.changed


def measure_times(run_dir: Path, workers: int, requests: int, dice: Random) -> dict[str, float]:
    """Measure times to the first token under `both` and a split; the two stacks take turns. Raises
    InternalError if a request fails."""
    bodies = [
        full_answer(_prompt(dice, _TIMED_PROMPT), dice.randint(*_TIMED_ANSWER))
        for _ in range(max(2, requests // ROUNDS))
    ]
    run_dir.mkdir(parents=True)
    sides = {"both": BOTH, "split": split(workers)}
    stacks: dict[str, Stack] = {}
    try:
        for side, roles in sides.items():
            settings = {
                **_TIMED,
                "placement.roles": roles,
            }
            stacks[side] = start_stack(run_dir / side, settings, workers=workers, name=side)
        return asyncio.run(_in_turns(stacks, bodies))
    finally:
        for stack in stacks.values():
            stack.tree.end()


async def _in_turns(stacks: dict[str, Stack], bodies: Sequence[dict[str, Any]]) -> dict[str, float]:
    first_s: dict[str, list[float]] = {side: [] for side in stacks}
    async with on_bus(stacks["split"].run_dir, "placement-0") as bus:
        watch = Watch()
        await bus.attach(HANDLERS, watch)
        for number in range(ROUNDS):
            for side, stack in stacks.items():
                answers = await _spaced(stack.target, _anew(bodies, f"round {number}"))
                if error := first_error(answers):
                    raise InternalError(f"the stack {side!r} does not serve: {error}")
                first_s[side] += [answer.first_s for answer in answers]
    later_s = [one - other for one, other in zip(first_s["split"], first_s["both"], strict=True)]
    found = {f"ttft_p50_s_{side}": percentile(times, 50) for side, times in first_s.items()}
    found |= {f"ttft_p99_s_{side}": percentile(times, 99) for side, times in first_s.items()}
    moved = sum(one.moved_bytes for one in watch.done)
    return found | {
        "first_later_s_p50": median(later_s),
        "first_later_s_p90": percentile(later_s, 90),
        "step_s": median(watch.steps_s),
        "requests": float(len(later_s)),
        "hand_overs": float(len(watch.done)),
        "late_share": sum(one.late_bytes for one in watch.done) / max(1, moved),
        "late_s_p50": median(one.late_s for one in watch.done) if watch.done else 0.0,
    }


def _anew(bodies: Sequence[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    """Return the requests with a new cache salt, so that no prefix is cached."""
    return [{**body, "cache_salt": salt} for body in bodies]


async def _spaced(target: Target, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(complete(target, body, _DEADLINE_S)))
        await asyncio.sleep(_EVERY_S)
    return list(await asyncio.gather(*tasks))


def measure_texts(run_dir: Path, workers: int, kills: int, dice: Random) -> dict[str, Any]:
    """Count gaps, duplicates and changed texts under hand-overs alone and under `kills` kills of each
    role. Raises InternalError if a stack does not serve, or does not recover from a kill."""
    bodies = _bodies(dice)
    run_dir.mkdir(parents=True)
    with start_stack(run_dir / "alone", {}, name="alone") as stack:
        wanted = asyncio.run(complete_all(stack.target, bodies, _DEADLINE_S))
    if error := first_error(wanted):
        raise InternalError(f"a stack does not serve: {error}")
    with start_stack(
        run_dir / "split", {"placement.roles": split(workers)}, workers=workers, name="split"
    ) as stack:
        return asyncio.run(_disturbed(stack, bodies, wanted, kills, dice))


async def _disturbed(
    stack: Stack, bodies: Sequence[dict[str, Any]], wanted: Sequence[Answer], kills: int, dice: Random
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with on_bus(stack.run_dir, "placement-0") as bus:
        watch = Watch()
        await bus.attach(HANDLERS, watch)
        calm = Compared()
        for number in range(ROUNDS):
            calm.take(await complete_all(stack.target, _anew(bodies, f"calm {number}"), _DEADLINE_S), wanted)
        found["calm"], found["hand_overs"] = calm, len(watch.done)
        found["bytes"] = sum(one.moved_bytes for one in watch.done)
        for role in KILLED:
            killed, hit = Compared(), 0
            for number in range(kills):
                asked = _anew(bodies, f"{role} {number}")
                answers, in_the_middle = await _killed(stack, asked, watch, role, dice)
                killed.take(answers, wanted)
                hit += in_the_middle
                await _until_whole(stack)
            found[role] = killed
            found[f"{role} in the middle"] = hit
        found["hand_overs_all"] = len(watch.done)
    return found


async def _killed(
    stack: Stack, bodies: Sequence[dict[str, Any]], watch: Watch, role: Role, dice: Random
) -> tuple[list[Answer], bool]:
    """Return the answers, and whether the kill hit a prefill (a prefill worker) or a partial answer (a
    decode worker)."""
    rows = stack.details("hand_overs")["workers"]
    candidates = [row["worker"] for row in rows if row["role"] == role]
    asking = asyncio.create_task(complete_all(stack.target, bodies, _DEADLINE_S))
    async with asyncio.timeout(_DEADLINE_S):
        victim = await watch.until_busy(candidates, role)
        await asyncio.sleep(dice.uniform(0.0, _KILL_WITHIN_S))
        at_s = time.perf_counter()
        stack.process(victim).send_signal(signal.SIGKILL)
    answers = await asking
    begun = [one for one in answers if one.event_s and one.event_s[0] < at_s]
    if role is Role.PREFILL:
        return answers, len(begun) < len(answers)
    return answers, any(one.event_s[-1] > at_s for one in begun)


async def _until_whole(stack: Stack) -> None:
    """Wait until every worker is back with a role. Raises InternalError on a timeout."""
    until_s = time.monotonic() + _REST_S
    wanted = sorted(str(stack.describes["placement.roles"]).split(","))
    while time.monotonic() < until_s:
        try:
            told = await asyncio.to_thread(stack.details, "hand_overs")
            if sorted(row["role"] for row in told["workers"]) == wanted:
                await asyncio.sleep(_CALM_S)
                return
        except (psutil.NoSuchProcess, InternalError):
            pass
        await asyncio.sleep(0.3)
    raise InternalError(f"the stack was not whole again within {_REST_S:g} s")


def _bodies(dice: Random) -> list[dict[str, Any]]:
    """Return the requests: half greedy, half seeded."""
    return [
        full_answer(_prompt(dice, _PROMPT), dice.randint(*_ANSWER))
        | ({} if number % 2 else {"temperature": 0.8, "seed": number})
        for number in range(STREAMS)
    ]


def _prompt(dice: Random, tokens: tuple[int, int]) -> list[int]:
    return drawn_tokens(dice, vocabulary(TINY_CHAT), dice.randint(*tokens))
