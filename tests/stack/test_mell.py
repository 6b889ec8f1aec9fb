"""Four workers and a load that falls and rises: MELL empties workers, has them stopped and started again."""

import asyncio
import time
from typing import Any

import pytest

from services.stack.access import BusAccess
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.bus import Bus
from shared.messages.moves import WorkersWanted
from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import mixed
from tests.stack.running import BLOCK_TOKENS, RunningStack

pytestmark = pytest.mark.stack
WORKERS = 4
STREAMS = 24
MOST_ROUNDS = 5
"""Until a worker was emptied by moves: where its answers are nearly over, waiting for them is cheaper."""
SETTINGS = (
    "placement.policy=mell",
    "placement.scale=true",
    "placement.idle_s=1.0",
    "placement.epoch_s=0.2",
    f"worker.kv_blocks={64 * 16 // BLOCK_TOKENS}",
)


def questions(count: int, *, shortest: int, step: int) -> list[Question]:
    """All at once, and over one after the other."""
    return [
        Question(prompt, {"max_tokens": shortest + step * index, "ignore_eos": True, "temperature": 0})
        for index, prompt in enumerate(mixed(count, longest_words=160, seed=9))
    ]


four = stack_of("four", workers=WORKERS, settings=SETTINGS)


def parked(stack: RunningStack) -> int:
    return sum(stack.child(f"worker-{number}")["state"] == "parked" for number in range(WORKERS))


async def until_parked(stack: RunningStack, count: int, within_s: float = STACK_PATIENCE_S) -> None:
    deadline_s = time.monotonic() + within_s
    while parked(stack) < count:
        assert time.monotonic() < deadline_s, (stack.details("placement-0"), stack.logs())
        await asyncio.sleep(0.2)


async def watch(stack: RunningStack, seen: list[int]) -> None:
    """How many are parked, over and over."""
    while True:
        seen.append(parked(stack))
        await asyncio.sleep(0.05)


async def test_a_falling_load_needs_fewer_workers_and_a_rising_one_gets_them_back(four: RunningStack) -> None:
    client = four.client()
    asked = questions(STREAMS, shortest=60, step=10)
    details: dict[str, Any] = {"moves_ordered": 0}
    for _ in range(MOST_ROUNDS):
        first = await client.ask_all(asked)
        assert all(answer.complete for answer in first)
        await until_parked(four, WORKERS - 1)
        details = four.details("placement-0")
        if details["moves_ordered"]:
            break
    assert details["wanted_workers"] == 1 and details["moves_ordered"] > 0, details
    assert sum(row["state"] in ("idle", "T", "S", "M", "L") for row in details["workers"]) == 1

    fewest: list[int] = []
    watching = asyncio.create_task(watch(four, fewest))
    again = await client.ask_all(asked)
    watching.cancel()
    assert_same(again, first)
    assert min(fewest) < WORKERS - 1, "none was started for those that waited"
    assert max(four.child(f"worker-{number}")["restarts"] for number in range(WORKERS)) == 0
    await until_parked(four, WORKERS - 1)


async def test_a_stack_that_is_not_scaled_parks_nobody_whoever_says_so(stack: RunningStack) -> None:
    """One forged, or stray, event stopped every worker but the last, `placement.scale` being off."""
    run = RunDirectory(stack.run_dir)
    access = BusAccess.from_state(run.read_state(), run.credentials())
    bus = await Bus.connect(access.config("placement-0"), service="placement", instance="placement-0")
    try:
        parked = ("worker-0", "worker-1")
        event = WorkersWanted(wanted=1, parked=parked)
        await bus.publish(subjects.PLACEMENT_WANTED, event)
    finally:
        await bus.close()
    for _ in range(20):
        assert {stack.child(name)["state"] for name in parked} == {"ready"}
        await asyncio.sleep(0.05)
