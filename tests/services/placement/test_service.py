"""Placement over a real bus."""

import asyncio

from services.placement.config import PlacementConfig
from services.placement.policy.worst_fit import WorstFit
from services.placement.service import HANDLERS, Placement
from shared import subjects
from shared.messages.base import Empty
from shared.messages.commands import Placements, PlaceSequences
from shared.messages.reports import ServiceStatus
from tests.conftest import ConnectBus
from tests.services.placement.test_state import item, report


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
    clock.now_s += 2.5
    assert await place("e") == (None,)
