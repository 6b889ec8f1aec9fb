"""Placement under `mell` over a real bus: moves are ordered, refusals taken back, spare workers named."""

import asyncio

import msgspec

from services.placement.config import PlacementConfig
from services.placement.placing import Placement
from services.placement.relocation import HANDLERS as MOVE_HANDLERS
from services.placement.service import HANDLERS, run
from shared import subjects
from shared.bus import Bus, Endpoint, Listener
from shared.config import BusConfig
from shared.messages.base import Empty
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, SequenceMoved, WorkersWanted
from shared.messages.reports import ServiceStatus
from tests.conftest import ConnectBus
from tests.patience import PATIENCE_S, until
from tests.services.placement.rig import listed, report
from tests.tasks import running

CONFIG = PlacementConfig(policy="mell", epoch_s=0.05, scale=True, idle_s=0.2, worker_timeout_s=60.0)


class Scheduler:
    """Takes orders, or refuses the first."""

    HANDLERS = (
        Endpoint(subjects.SCHEDULER_MOVE, MoveSequences, "move"),
        Listener(subjects.PLACEMENT_WANTED, WorkersWanted, "on_wanted"),
    )

    def __init__(self, refuses: int = 0) -> None:
        self.orders: list[SequenceMove] = []
        self.wanted: list[WorkersWanted] = []
        self.refuses = refuses

    async def move(self, command: MoveSequences) -> MovesTaken:
        self.orders += command.moves
        refusals = tuple("no" if self.refuses > at else "" for at in range(len(command.moves)))
        self.refuses = max(0, self.refuses - len(command.moves))
        return MovesTaken(refusals=refusals)

    def on_wanted(self, event: WorkersWanted) -> None:
        self.wanted.append(event)


async def serving(bus: Bus) -> tuple[Placement, "asyncio.Task[None]"]:
    placement = Placement(bus, CONFIG, None)
    await bus.attach(HANDLERS, placement)
    assert placement.relocation is not None
    await bus.attach(MOVE_HANDLERS, placement.relocation)
    return placement, asyncio.create_task(placement.watch())


async def test_two_half_empty_workers_become_one_and_the_other_is_parked(connect_bus: ConnectBus) -> None:
    _, watching = await serving(await connect_bus("placement", "placement-0"))
    peer, scheduler = await connect_bus("scheduler", "scheduler-0"), Scheduler()
    await peer.attach(Scheduler.HANDLERS, scheduler)
    try:
        for number in range(2):
            here = (listed(f"r{number}", prompt=150, blocks=10),)
            await peer.publish(subjects.worker_reported(f"w{number}"), report(f"w{number}", sequences=here))
        await until(lambda: bool(scheduler.orders))
        order = scheduler.orders[0]
        source = {"w0": "w1", "w1": "w0"}[order.target]
        moved = SequenceMoved(ref=order.ref, source=source, target=order.target)
        both = (listed("r0", prompt=150, blocks=10, attempt=2), listed("r1", prompt=150, blocks=10))
        await peer.publish(subjects.worker_reported(source), report(source, seq=2))
        await peer.publish(
            subjects.worker_reported(order.target), report(order.target, seq=2, sequences=both)
        )
        await peer.publish(subjects.SCHEDULER_MOVED, moved)
        await until(lambda: any(source in event.parked for event in scheduler.wanted))
        assert scheduler.wanted[-1].wanted == 1
        (status,) = await peer.gather(
            subjects.status("placement"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
        )
        states = {row["worker"]: row["state"] for row in status.details["workers"]}
        assert states[source] == "retired" and states[order.target] in "TSML"
        assert status.details["moves_ordered"] >= 1
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_refused_order_is_taken_back(connect_bus: ConnectBus) -> None:
    placement, watching = await serving(await connect_bus("placement", "placement-0"))
    peer, scheduler = await connect_bus("scheduler", "scheduler-0"), Scheduler(refuses=1)
    await peer.attach(Scheduler.HANDLERS, scheduler)
    try:
        for number in range(2):
            here = (listed(f"r{number}", prompt=150, blocks=10),)
            await peer.publish(subjects.worker_reported(f"w{number}"), report(f"w{number}", sequences=here))
        relocation = placement.relocation
        assert relocation is not None
        await until(lambda: relocation.packer.counts.failed >= 1)
        relocation.packer.check_integrity()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_each_model_says_for_itself_how_many_workers_it_wants(
    connect_bus: ConnectBus, bus_config: BusConfig
) -> None:
    """One model's workers stand idle and are parked; the other's work, and all of them are wanted."""
    peer, scheduler = await connect_bus("scheduler", "scheduler-0"), Scheduler()
    await peer.attach(Scheduler.HANDLERS, scheduler)

    def last(model: str) -> WorkersWanted | None:
        return next((event for event in reversed(scheduler.wanted) if event.model == model), None)

    async def heard() -> bool:
        for model, workers in {"idle": ("w0", "w1"), "busy": ("w2", "w3")}.items():
            for name in workers:
                here = (listed(f"r{name}", prompt=700, blocks=45),) if model == "busy" else ()
                told = msgspec.structs.replace(report(name, sequences=here), model=model)
                await peer.publish(subjects.worker_reported(name), told)
        await asyncio.sleep(0.05)
        event = last("idle")
        return event is not None and event.parked == ("w1",)

    async with running(run(CONFIG.model_copy(update={"bus": bus_config}))):
        async with asyncio.timeout(PATIENCE_S):
            while not await heard():
                pass
        idle, busy = last("idle"), last("busy")
        assert idle is not None and busy is not None
        assert (idle.wanted, busy.wanted, busy.parked) == (1, 2, ())
        (status,) = await peer.gather(
            subjects.status("placement"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
        )
    assert status.details["wanted_workers"] == 3
    shown = {row["model"]: (row["wanted_workers"], row["parked"]) for row in status.details["models"]}
    assert shown == {"idle": (1, "w1"), "busy": (2, "")}
