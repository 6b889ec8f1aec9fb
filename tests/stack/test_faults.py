"""Processes are killed and frozen while streams run; every answer arrives whole and unchanged."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer, Question, assert_same
from tests.stack.prompts import long_questions
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
STREAMS = 32
MIDWAY = 200
"""Chunks received over all streams when the fault happens: after the first, long before the last."""


def questions() -> list[Question]:
    """At least 60 tokens long, so that the fault finds them running."""
    return long_questions(STREAMS, least_tokens=60, step_tokens=2, longest_words=120, seed=1)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("victim") / "run") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(victim: RunningStack) -> list[Answer]:
    answers = asyncio.run(victim.client().ask_all(questions()))
    assert all(answer.complete for answer in answers)
    return answers


@pytest.mark.parametrize(
    "name", ["worker-0", "scheduler-0", "placement-0", "predictor-0", "ledger-0", "nats"]
)
async def test_killed(victim: RunningStack, undisturbed: list[Answer], name: str) -> None:
    before = victim.child(name)["restarts"]

    async def kill() -> None:
        victim.signal(name, signal.SIGKILL)

    answers = await victim.client().ask_all(questions(), midway=kill, after=MIDWAY)
    assert_same(answers, undisturbed)
    await asyncio.to_thread(victim.until_restarted, name, restarts=before + 1)


async def test_frozen_and_woken(victim: RunningStack, undisturbed: list[Answer]) -> None:
    client = victim.client()

    async def freeze() -> None:
        victim.signal("worker-1", signal.SIGSTOP)

    try:
        answers = await client.ask_all(questions(), midway=freeze, after=MIDWAY)
    finally:
        victim.signal("worker-1", signal.SIGCONT)
    assert_same(answers, undisturbed)
    assert_same(await client.ask_all(questions()), undisturbed)


async def test_frozen_and_woken_while_its_requests_run_elsewhere(
    victim: RunningStack, undisturbed: list[Answer]
) -> None:
    async def freeze_then_wake() -> None:
        victim.signal("worker-1", signal.SIGSTOP)
        await asyncio.sleep(3.5)
        victim.signal("worker-1", signal.SIGCONT)

    try:
        answers = await victim.client().ask_all(questions(), midway=freeze_then_wake, after=MIDWAY)
    finally:
        victim.signal("worker-1", signal.SIGCONT)
    assert_same(answers, undisturbed)


async def test_last_frames_lost(tmp_path: Path, undisturbed: list[Answer]) -> None:
    with running_stack(tmp_path / "run", settings=("worker.fault_drop_final_frames=true",)) as stack:
        assert_same(await stack.client().ask_all(questions()), undisturbed)


async def test_clients_that_leave_free_their_blocks(victim: RunningStack) -> None:
    task = asyncio.create_task(victim.client().ask_all(questions()))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait([task])
    for _ in range(20):
        await asyncio.sleep(0.1)
        workers = await asyncio.to_thread(lambda: [victim.details(name) for name in ("worker-0", "worker-1")])
        unused = [row["free_blocks"] + row["evictable_blocks"] == row["total_blocks"] for row in workers]
        if all(unused) and not any(row["sequences"] for row in workers):
            return
    raise AssertionError(workers)


async def test_a_crash_is_one_verdict_everywhere(victim: RunningStack) -> None:
    """`status`, /ready and metrics say the same of a stack whose worker has just crashed and is back."""
    before = victim.child("worker-1")["restarts"]
    victim.signal("worker-1", signal.SIGKILL)
    await asyncio.to_thread(victim.until_restarted, "worker-1", restarts=before + 1)
    operator = victim.operator_url
    async with asyncio.timeout(STACK_PATIENCE_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            said = (await client.get(f"{operator}/ready")).json()
            if any(trouble.startswith("worker-1 crashed") for trouble in said.get("troubles", ())):
                break
            await asyncio.sleep(0.5)
        assert (said["status"], said["well"]) == ("ready", False)
        assert "\nkvasir_stack_well 0.0" in (await client.get(f"{operator}/metrics")).text
    assert victim.command("status").stdout.startswith("well: no: ")
