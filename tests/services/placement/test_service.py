"""Placement over a real bus."""

import asyncio

import pytest

from services.placement.config import PlacementConfig
from services.placement.placing import Placement
from services.placement.policy import LIVE_PACKINGS, POLICIES, create
from services.placement.policy.fit import PrefixAware, WorstFit
from services.placement.service import HANDLERS
from shared import subjects
from shared.bus import Endpoint
from shared.messages.base import Empty
from shared.messages.commands import Placements, PlaceSequences
from shared.messages.plans import EndedSequence
from shared.messages.prefixes import FindPrefixes, WorkerPrefixes
from shared.messages.reports import ServiceStatus
from shared.messages.sequence import FinishReason
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.placement.rig import chain, item, news, report, stepped


class SteppingClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_places_on_whoever_is_heard_until_it_falls_silent(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("placement", "placement-0")
    clock = SteppingClock()
    placement = Placement(bus, PlacementConfig(policy="worst_fit"), WorstFit(), clock)
    await bus.attach(HANDLERS, placement)
    client = await connect_bus("scheduler", "scheduler-0")

    async def place(*requests: str, excluded: tuple[str, ...] = ()) -> tuple[str | None, ...]:
        question = PlaceSequences(items=tuple(item(r) for r in requests), excluded_workers=excluded)
        answer = await client.request(subjects.PLACEMENT_PLACE, question, Placements, deadline_s=5.0)
        return answer.worker_ids

    assert await place("a") == (None,)
    await client.publish(subjects.worker_reported("w0"), report("w0"))
    await client.publish(subjects.worker_reported("w1"), report("w1"))
    for _ in range(500):
        if len(placement.fleet.workers) == 2:
            break
        await asyncio.sleep(0.01)
    assert set(await place("b", "c")) == {"w0", "w1"}
    assert await place("d", excluded=("w0",)) == ("w1",)
    (status,) = await client.gather(
        subjects.status("placement"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
    )
    assert [row["worker"] for row in status.details["workers"]] == ["w0", "w1"]
    assert status.details["policy"] == "worst_fit"
    clock.now_s += 30.0
    assert await place("e") != (None,), "this process was stopped: nobody has been silent"
    for _ in range(5):
        clock.now_s += 0.5
        answer = await place("e")
    assert answer == (None,)


@pytest.mark.parametrize("policy", [*POLICIES, *LIVE_PACKINGS])
async def test_answers_shorter_than_a_heartbeat_hold_no_place_after_their_end(
    connect_bus: ConnectBus, policy: str
) -> None:
    """Under `mell` and its like what ended unseen kept its place for `reservation_s`, so a burst of short
    answers took ten seconds on idle workers. The clock stands still here: nothing expires."""
    bus = await connect_bus("placement", "placement-0")
    chooser = None if policy in LIVE_PACKINGS else create(policy)
    placement = Placement(bus, PlacementConfig(policy=policy), chooser, SteppingClock())
    await bus.attach(HANDLERS, placement)
    for name in ("w0", "w1", "w2"):
        placement.on_reported(report(name, total=96))
    waiting = [item(f"r{number}", size=430, limit=440) for number in range(24)]
    for step in range(1, 9):
        answer = await placement.place(PlaceSequences(items=tuple(waiting)))
        homes = {asked.ref: home for asked, home in zip(waiting, answer.worker_ids, strict=True) if home}
        assert len(homes) >= min(3, len(waiting)), "the workers are empty"
        waiting = [asked for asked in waiting if asked.ref not in homes]
        for name in ("w0", "w1", "w2"):
            over = [
                EndedSequence(ref=ref, finish_reason=FinishReason.STOP, generated_tokens=10)
                for ref, home in homes.items()
                if home == name
            ]
            await bus.publish(subjects.worker_stepped(name), stepped(name, step, *over))
        await until(lambda: not any(worker.reservations for worker in placement.fleet.workers.values()))
        if not waiting:
            break
    assert not waiting


class Caching:
    """A worker that can say what it has cached."""

    HANDLERS = (Endpoint(subjects.worker_prefixes, FindPrefixes, "find"),)

    def __init__(self) -> None:
        self.asked: list[FindPrefixes] = []

    async def find(self, question: FindPrefixes) -> WorkerPrefixes:
        self.asked.append(question)
        return news(8, 1, 2, 3, full=True)


async def test_a_prompt_goes_where_its_beginning_is_and_what_was_missed_is_asked_for(
    connect_bus: ConnectBus,
) -> None:
    bus = await connect_bus("placement", "placement-0")
    placement = Placement(bus, PlacementConfig(), PrefixAware())
    await bus.attach(HANDLERS, placement)
    watching = asyncio.create_task(placement.watch())
    worker, caching = await connect_bus("worker", "w0"), Caching()
    await worker.attach(Caching.HANDLERS, caching)
    client = await connect_bus("scheduler", "scheduler-0")
    heard = placement.fleet

    async def place(request: str, *names: int) -> str | None:
        asked = item(request, size=100, limit=200, prefixes=(chain(*names),))
        question = PlaceSequences(items=(asked,))
        answer = await client.request(subjects.PLACEMENT_PLACE, question, Placements, deadline_s=5.0)
        return answer.worker_ids[0]

    try:
        for name in ("w0", "w1"):
            await worker.publish(subjects.worker_reported(name), report(name))
        await until(lambda: len(heard.workers) == 2)
        await worker.publish(subjects.worker_cached("w0"), news(7, 1))
        await until(lambda: heard.prefixes.blocks("w0") == 3)
        assert [(q.incarnation, q.since_seq) for q in caching.asked] == [(1, 0)]
        assert await place("a", 1, 2, 9) == "w0"
        assert await place("b", *range(20, 26)) == "w1", "nobody has it: to the emptiest"
        assert await place("c", *range(20, 26)) == "w1", "it is about to be computed there"
        await worker.publish(subjects.worker_cached("w0"), news(9, 30))
        await until(lambda: heard.prefixes.blocks("w0") == 4)
        assert len(caching.asked) == 1, "no gap, no question"
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
