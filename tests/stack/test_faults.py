"""Processes are killed and frozen while streams run; every answer arrives whole and unchanged."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.patience import STACK_PATIENCE_S
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
    answers = asyncio.run(stack.client().ask_all(questions()))
    assert all(answer.complete for answer in answers)
    return answers


@pytest.mark.parametrize("names", ["worker-0", "scheduler-0", "placement-0 predictor-0 ledger-0", "nats"])
async def test_killed(stack: RunningStack, undisturbed: list[Answer], names: str) -> None:
    before = {name: stack.child(name)["restarts"] for name in names.split()}

    async def kill() -> None:
        for name in before:
            stack.signal(name, signal.SIGKILL)

    answers = await stack.client().ask_all(questions(), midway=kill, after=MIDWAY)
    assert_same(answers, undisturbed)
    for name, restarts in before.items():
        await asyncio.to_thread(stack.until_restarted, name, restarts=restarts + 1)


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


async def test_frozen_and_woken_while_its_requests_run_elsewhere(
    stack: RunningStack, undisturbed: list[Answer]
) -> None:
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
