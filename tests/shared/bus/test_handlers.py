"""Lanes without a bus."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import subjects
from shared.bus.handlers import Lanes, subject_for


def test_a_subject_may_depend_on_the_instance() -> None:
    assert subject_for("kvasir.v1.evt.x", "worker-0") == "kvasir.v1.evt.x"
    assert subject_for(subjects.worker_plan, "worker-0") == "kvasir.v1.cmd.worker.plan.worker-0"
    with pytest.raises(ValueError, match="no instance id"):
        subject_for(lambda instance: f"x.{instance}", "worker.*")


@settings(max_examples=60, deadline=None)
@given(
    concurrency=st.integers(1, 4),
    pending_limit=st.integers(0, 5),
    turns=st.lists(st.tuples(st.sampled_from(["offer", "finish"]), st.integers(0, 9)), max_size=40),
)
def test_lanes_against_a_model(concurrency: int, pending_limit: int, turns: list[tuple[str, int]]) -> None:
    """Never more at once than lanes, never more waiting than the limit, started in order, nothing lost."""

    async def play() -> None:
        started: list[int] = []
        running: dict[int, asyncio.Event] = {}

        async def work(item: int) -> None:
            started.append(item)
            running[item] = asyncio.Event()
            await running[item].wait()
            del running[item]

        lanes = Lanes(work, concurrency, pending_limit)
        taken: list[int] = []
        for number, (turn, choice) in enumerate(turns):
            if turn == "offer":
                full = len(running) == concurrency and lanes.pending == pending_limit
                assert lanes.offer(number) is not full
                taken += [] if full else [number]
            elif running:
                sorted(running.items())[choice % len(running)][1].set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(running) <= concurrency and lanes.pending <= pending_limit
        while running:
            for event in list(running.values()):
                event.set()
            await asyncio.sleep(0)
        assert started == taken
        await lanes.stop(0.0)

    asyncio.run(play())


async def test_stop_waits_for_what_runs_and_waits_then_cancels() -> None:
    done: list[int] = []

    async def work(item: int) -> None:
        await asyncio.sleep(60 if item == 2 else 0.01)
        done.append(item)

    lanes = Lanes(work, concurrency=1, pending_limit=9)
    for item in (0, 1, 2, 3):
        assert lanes.offer(item)
    async with asyncio.timeout(5):
        await lanes.stop(0.2)
    assert done == [0, 1] and lanes.pending == 0
