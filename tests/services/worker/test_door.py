"""The door to the engine's thread: what changes hands has an owner at every moment, whoever stops waiting."""

import asyncio
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker import door as door_module
from services.worker.core.steps import StepCore, StepEffects
from services.worker.door import Door
from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.stock import Stock
from shared.errors import DeadlineExceeded, Overloaded
from shared.messages.lending import KvTier

BLOCKS = 8


class Rig:
    """A pool behind a door; `step_ends` is when its engine's thread looks at the door."""

    def __init__(self) -> None:
        self.door = Door(cast(StepCore, None), lambda: 0.0, lambda effects: None)
        self.pool = BlockPool(BLOCKS, 4)
        self.stock = Stock(self.door, self.pool, 0, 0)

    async def take(self, blocks: int) -> list[int]:
        return await self.door.take(lambda core, _: self.pool.allocate(blocks), self.pool.release)

    def give_back(self, block: int) -> None:
        self.door.give(lambda core, _: self.pool.release([block]))

    def step_ends(self) -> None:
        self.door.run_waiting(0.0)


async def settle() -> None:
    """Every callback that is due has run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_taken_for_somebody_who_left_goes_back() -> None:
    rig = Rig()
    for moment in ("before the step ends", "before the answer is read"):
        taking = asyncio.create_task(rig.take(3))
        await settle()
        if moment == "before the answer is read":
            rig.step_ends()
            assert rig.pool.free_blocks == BLOCKS - 3
        taking.cancel()
        await settle()
        rig.step_ends()
        assert taking.cancelled() and rig.pool.free_blocks == BLOCKS, moment


async def test_who_waits_for_what_he_gives_may_leave() -> None:
    rig = Rig()
    blocks = rig.pool.allocate(3)
    giving = asyncio.create_task(rig.stock.put_back([Freed(KvTier.DEVICE, tuple(blocks))], list))
    rig.pool.withdraw(blocks)
    await settle()
    giving.cancel()
    await settle()
    rig.step_ends()
    assert giving.cancelled() and rig.pool.free_blocks == BLOCKS


def test_a_thread_that_waited_long_enough_leaves_nothing_behind() -> None:
    rig = Rig()
    with pytest.raises(DeadlineExceeded):
        rig.door.take_within(lambda core, _: rig.pool.allocate(2), rig.pool.release, 0.01)
    rig.step_ends()
    assert rig.pool.free_blocks == BLOCKS


async def test_an_error_reaches_who_asked_and_is_not_undone() -> None:
    rig = Rig()
    taking = asyncio.create_task(rig.take(BLOCKS + 1))
    await settle()
    rig.step_ends()
    with pytest.raises(ValueError):
        await taking
    rig.step_ends()
    assert rig.pool.free_blocks == BLOCKS and rig.door.failed_commands == 0


def test_a_full_door_refuses_all_but_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_MAX_WAITING", 2)
    rig = Rig()
    blocks = rig.pool.allocate(2)
    rig.door.wake()
    rig.door.post(lambda core, _: StepEffects())
    with pytest.raises(Overloaded):
        rig.door.post(lambda core, _: StepEffects())
    with pytest.raises(Overloaded):
        rig.door.ask(lambda core, _: None)
    rig.door.give(lambda core, _: rig.pool.release(blocks))
    rig.step_ends()
    assert rig.pool.free_blocks == BLOCKS


def test_a_command_that_fails_is_counted_and_those_behind_it_run() -> None:
    rig, done = Rig(), []

    def fail(core: StepCore, now_s: float) -> StepEffects:
        raise RuntimeError("as told")

    rig.door.post(fail)
    given_back = rig.door.give(fail)
    rig.door.ask(lambda core, _: done.append(1))
    rig.step_ends()
    assert done == [1] and rig.door.failed_commands == 2
    assert isinstance(given_back.exception(), RuntimeError)


@given(st.lists(st.sampled_from(["take", "give", "cancel", "step", "loop"]), max_size=40), st.randoms())
def test_blocks_are_conserved_whatever_is_cancelled_when(acts: list[str], dice: Random) -> None:
    async def run() -> None:
        rig = Rig()
        mine: list[int] = []
        tasks: set[asyncio.Task[None]] = set()

        async def take() -> None:
            mine.extend(await rig.take(1))

        for act in [*acts, "loop", "step", "loop", "step", "loop"]:
            if act == "take" and len(tasks) < BLOCKS:
                tasks.add(asyncio.create_task(take()))
            elif act == "give" and mine:
                rig.give_back(mine.pop())
            elif act == "cancel" and tasks:
                dice.choice(sorted(tasks, key=id)).cancel()
            elif act == "step":
                rig.step_ends()
            elif act == "loop":
                await asyncio.sleep(0)
                tasks = {task for task in tasks if not task.done()}
        await settle()
        rig.step_ends()
        await settle()
        rig.step_ends()
        rig.pool.check_integrity(mine)
        assert rig.pool.free_blocks + len(mine) == BLOCKS

    asyncio.run(run())
