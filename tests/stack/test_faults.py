"""Processes are killed and frozen, sequences moved, while clients read: answers stay whole and unchanged."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bench.live.migrate.mover import Mover, mover
from shared.messages.moves import MoveMode
from tests.patience import STACK_PATIENCE_S
from tests.services.stack.test_commands import check_trace
from tests.stack.client import Answer, Question, assert_same
from tests.stack.prompts import long_questions
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
STREAMS = 16
MIDWAY = 100
"""Chunks received over all streams when the fault happens: after the first, long before the last."""


def questions() -> list[Question]:
    """At least 60 tokens long, so that the fault finds them running."""
    return long_questions(STREAMS, least_tokens=60, step_tokens=2, longest_words=120, seed=1)


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[Answer]:
    return stack.answers(questions())


@pytest.mark.parametrize("names", ["worker-0", "scheduler-0", "placement-0 predictor-0 ledger-0", "nats"])
async def test_killed(stack: RunningStack, undisturbed: list[Answer], names: str) -> None:
    assert_same(await stack.ask_and_kill(questions(), MIDWAY, *names.split()), undisturbed)


async def test_frozen_and_woken(stack: RunningStack, undisturbed: list[Answer]) -> None:
    client = stack.client()

    async def freeze() -> None:
        stack.signal("worker-1", signal.SIGSTOP)

    try:
        answers = await client.ask_all(questions(), midway=freeze, after=MIDWAY)
    finally:
        stack.signal("worker-1", signal.SIGCONT)
    assert_same(answers, undisturbed)
    assert_same(await client.ask_all(questions()), undisturbed)


async def test_woken_while_its_requests_run_elsewhere(stack: RunningStack, undisturbed: list[Answer]) -> None:
    async def freeze_then_wake() -> None:
        stack.signal("worker-1", signal.SIGSTOP)
        await asyncio.sleep(3.5)
        stack.signal("worker-1", signal.SIGCONT)

    try:
        answers = await stack.client().ask_all(questions(), midway=freeze_then_wake, after=MIDWAY)
    finally:
        stack.signal("worker-1", signal.SIGCONT)
    assert_same(answers, undisturbed)


async def test_last_frames_lost(tmp_path: Path, undisturbed: list[Answer]) -> None:
    with running_stack(tmp_path / "run", settings=("worker.fault_drop_final_frames=true",)) as lossy:
        assert_same(await lossy.client().ask_all(questions()), undisturbed)


async def test_clients_that_leave_free_their_blocks(stack: RunningStack) -> None:
    task = asyncio.create_task(stack.client().ask_all(questions()))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait([task])
    for _ in range(20):
        await asyncio.sleep(0.1)
        workers = await asyncio.to_thread(lambda: [stack.details(name) for name in ("worker-0", "worker-1")])
        unused = [row["free_blocks"] + row["evictable_blocks"] == row["total_blocks"] for row in workers]
        if all(unused) and not any(row["sequences"] for row in workers):
            return
    raise AssertionError(workers)


async def test_a_crash_is_one_verdict_everywhere(stack: RunningStack) -> None:
    """`status`, /ready and metrics say the same of a stack whose worker has just crashed and is back."""
    before = stack.child("worker-1")["restarts"]
    stack.signal("worker-1", signal.SIGKILL)
    await asyncio.to_thread(stack.until_restarted, "worker-1", restarts=before + 1)
    operator = stack.operator_url
    async with asyncio.timeout(STACK_PATIENCE_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            said = (await client.get(f"{operator}/ready")).json()
            if any(trouble.startswith("worker-1 crashed") for trouble in said.get("troubles", ())):
                break
            await asyncio.sleep(0.5)
        assert (said["status"], said["well"]) == ("ready", False)
        assert "\nkvasir_stack_well 0.0" in (await client.get(f"{operator}/metrics")).text
    assert stack.command("status").stdout.startswith("well: no: ")


LONG_STREAMS = 8
MOVE_AFTER = 40
"""Chunks received over all streams before anything is moved."""
MOVES = 12
ALL_ENDED_S = 1.0
"""Without a sequence in any heartbeat that could be moved: longer than one waits for its first token."""


def moved_questions() -> list[Question]:
    """Long enough to be moved more than once."""
    return long_questions(LONG_STREAMS, least_tokens=240, step_tokens=4, longest_words=160, seed=5)


@pytest.fixture(scope="module")
def undisturbed_long(stack: RunningStack) -> list[Answer]:
    return stack.answers(moved_questions())


@pytest.fixture(params=["kv", "tokens"])
async def moving(stack: RunningStack, request: pytest.FixtureRequest) -> AsyncIterator[Mover]:
    async with mover(stack.run_dir, request.param) as made:
        yield made


async def order(moving: Mover, count: int, *, within_s: float = 20.0) -> int:
    """Orders up to so many moves, fewer where nothing is left that could be moved; how many were begun."""
    begun, seen_s = 0, time.monotonic()
    async with asyncio.timeout(within_s):
        while begun < count:
            if moving.under_way or moving.running(least_left=20):
                seen_s = time.monotonic()
            elif begun and time.monotonic() - seen_s > ALL_ENDED_S:
                return begun
            begun += await moving.move_one(least_left=20)
            await asyncio.sleep(0.01)
    return begun


async def test_moved_while_read(stack: RunningStack, undisturbed_long: list[Answer], moving: Mover) -> None:
    begun: list[int] = []

    async def move() -> None:
        begun.append(await order(moving, MOVES))

    answers = await stack.client().ask_all(moved_questions(), midway=move, after=MOVE_AFTER)
    assert_same(answers, undisturbed_long)
    await moving.until_over(begun[0], within_s=10)
    assert len(moving.done) >= MOVES // 4, (moving.outcomes, moving.refusals)
    if moving.modes.counts["kv"]:
        by_kv = [moved for moved in moving.done if moved.mode is MoveMode.KV and moved.moved_bytes]
        assert by_kv, moving.outcomes


@pytest.mark.parametrize(
    ("victim", "moving", "delay_s"),
    [
        pytest.param(victim, way, delay_s, marks=[] if (number + at) % 4 == 0 else pytest.mark.slow)
        for number, victim in enumerate(("worker-0", "worker-1", "scheduler-0", "placement-0"))
        for at, (way, delay_s) in enumerate((("kv", 0.0), ("kv", 0.02), ("tokens", 0.0), ("tokens", 0.02)))
    ],
    indirect=["moving"],
)
async def test_killed_during_moves(
    stack: RunningStack, undisturbed_long: list[Answer], moving: Mover, victim: str, delay_s: float
) -> None:
    """Sources and targets alike: half of the moves go either way."""
    before = stack.child(victim)["restarts"]

    async def move_and_kill() -> None:
        await order(moving, 6)
        await asyncio.sleep(delay_s)
        stack.signal(victim, signal.SIGKILL)

    answers = await stack.client().ask_all(moved_questions(), midway=move_and_kill, after=MOVE_AFTER)
    assert_same(answers, undisturbed_long)
    await asyncio.to_thread(stack.until_restarted, victim, restarts=before + 1)


@pytest.mark.parametrize("moving", ["kv"], indirect=True)
@pytest.mark.slow  # killed ones are in every run
async def test_frozen_source(stack: RunningStack, undisturbed_long: list[Answer], moving: Mover) -> None:
    async def move_and_freeze() -> None:
        await order(moving, 6)
        stack.signal("worker-0", signal.SIGSTOP)

    try:
        answers = await stack.client().ask_all(moved_questions(), midway=move_and_freeze, after=MOVE_AFTER)
    finally:
        stack.signal("worker-0", signal.SIGCONT)
    assert_same(answers, undisturbed_long)
    assert_same(await stack.client().ask_all(moved_questions()), undisturbed_long)


@pytest.mark.parametrize("moving", ["kv"], indirect=True)
async def test_a_trace_for_perfetto_has_those_that_moved_and_those_that_were_resumed(
    stack: RunningStack, undisturbed_long: list[Answer], moving: Mover, tmp_path: Path
) -> None:
    before, began_s = {name: stack.child(name)["restarts"] for name in ("worker-0", "worker-1")}, time.time()
    killed: list[str] = []

    async def move_and_kill() -> None:
        await moving.until_over(min(2, await order(moving, 4)), within_s=10)
        busiest = Counter(name for name, _ in moving.running(least_left=20)).most_common(1)
        killed.append(busiest[0][0])
        stack.signal(killed[0], signal.SIGKILL)

    answers = await stack.client().ask_all(moved_questions(), midway=move_and_kill, after=MOVE_AFTER)
    assert_same(answers, undisturbed_long)
    await asyncio.to_thread(stack.until_restarted, killed[0], restarts=before[killed[0]] + 1)
    for flags in (("--out", "all.jsonl"), ("--perfetto", "--out", "trace.json")):
        done = await asyncio.to_thread(stack.command, "record", *flags[:-1], str(tmp_path / flags[-1]))
        assert done.returncode == 0, done.stdout + done.stderr
    _, *events = map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(traced)
    moved = {each["request"] for each in events if each["kind"] == "moved" and not each["failed"]}
    # Others used this stack before, with schedulers and workers that have forgotten what was theirs.
    own = {each["request"] for each in events if each["kind"] == "submit" and each["unix_s"] >= began_s}
    submits = [each for each in events if each["kind"] == "submit"]
    resumed = {each["request"] for each in submits if each["causes"].keys() - {"moved"}}
    assert moved & own and resumed & own
    drawn = [each["args"]["request"] for each in traced if each["name"] == "move" and each["ph"] == "X"]
    assert set(drawn) == moved and sum(each["ph"] == "s" for each in traced) >= len(moved)
    stays: dict[str, set[str]] = {}
    for each in traced:
        if each["ph"] == "b" and each["name"].startswith("at "):
            stays.setdefault(each["id"], set()).add(each["name"])
    assert all(len(stays[request_id]) > 1 for request_id in (moved | resumed) & own)
