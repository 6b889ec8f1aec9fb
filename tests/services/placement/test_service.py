"""Placement over a real bus: choices, prefix events, roles, moves and scaling."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from services.placement import placing
from services.placement.config import PlacementConfig
from services.placement.placing import Placement, PlacementModels
from services.placement.policy import LIVE_PACKINGS, POLICIES, create
from services.placement.relocation import PackingPlacement
from services.placement.role_keeping import RolePlacement
from services.placement.service import HANDLERS, MOVE_HANDLERS, run
from shared import subjects
from shared.bus import Bus, Endpoint, Listener
from shared.config import BusConfig
from shared.messages.base import Empty
from shared.messages.commands import Placements, PlaceSequences
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, SequenceMoved, WorkersWanted
from shared.messages.plans import EndedSequence
from shared.messages.prefixes import FindPrefixes, WorkerPrefixes
from shared.messages.reports import ServiceStatus
from shared.messages.sequence import FinishReason
from shared.shards import Shard
from tests.conftest import ConnectBus
from tests.patience import PATIENCE_S, until
from tests.services.placement.rig import chain, item, listed, news, report, stepped
from tests.tasks import running

PACKING = PlacementConfig(policy="mell", epoch_s=0.05, scale=True, idle_s=0.2, worker_timeout_s=60.0)


class SteppingClock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def serving(bus: Bus, placement: Placement) -> AsyncIterator[None]:
    """Serve every model with this placement."""
    is_ready = asyncio.Event()

    async def serve() -> None:
        async with asyncio.TaskGroup() as tasks:
            models = PlacementModels(bus, lambda model, shard: placement, tasks)
            await bus.attach((*HANDLERS, *MOVE_HANDLERS), models)
            is_ready.set()
            await asyncio.Event().wait()

    async with running(serve()):
        await is_ready.wait()
        yield


async def status_of(client: Bus) -> ServiceStatus:
    (status,) = await client.gather(
        subjects.status("placement"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
    )
    return status


async def place(client: Bus, *asked: str, excluded: tuple[str, ...] = ()) -> tuple[str | None, ...]:
    question = PlaceSequences(items=tuple(map(item, asked)), excluded_workers=excluded)
    answer = await client.request(subjects.PLACEMENT_PLACE, question, Placements, deadline_s=5.0)
    return answer.worker_ids


async def test_only_workers_with_recent_heartbeats_are_chosen(connect_bus: ConnectBus) -> None:
    bus, client = await connect_bus("placement", "placement-0"), await connect_bus("scheduler", "scheduler-0")
    clock = SteppingClock()
    placement = Placement(bus, PlacementConfig(policy="worst_fit"), create("worst_fit"), clock)
    async with serving(bus, placement):
        assert await place(client, "a") == (None,)
        for name in ("w0", "w1"):
            await client.publish(subjects.worker_reported(name), report(name))
        await until(lambda: len(placement.fleet.workers) == 2)
        assert set(await place(client, "b", "c")) == {"w0", "w1"}
        assert await place(client, "d", excluded=("w0",)) == ("w1",)
        status = await status_of(client)
        assert [row["worker"] for row in status.details["workers"]] == ["w0", "w1"]
        assert status.details["policy"] == "worst_fit"
        clock.now_s += 30.0
        assert await place(client, "e") != (None,), "this process was stopped: no worker has been silent"
        for _ in range(5):
            clock.now_s += 0.5
            answer = await place(client, "e")
        assert answer == (None,)


@pytest.mark.parametrize("policy", [*POLICIES, *LIVE_PACKINGS])
async def test_short_answers_hold_no_place_after_their_end(connect_bus: ConnectBus, policy: str) -> None:
    """Under `mell` and its like an answer that ended unseen kept its place for 5 s, so a burst of short
    answers took ten seconds on idle workers. The clock stands still here: nothing expires."""
    bus = await connect_bus("placement", "placement-0")
    config = PlacementConfig(policy=policy)
    placement = (
        PackingPlacement(bus, config, clock=SteppingClock())
        if policy in LIVE_PACKINGS
        else Placement(bus, config, create(policy), SteppingClock())
    )
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
            placement.on_stepped(stepped(name, step, *over))
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


@pytest.mark.parametrize("hears_news", [True, False])
async def test_a_prompt_goes_to_the_worker_with_its_prefix_once_it_was_asked(
    connect_bus: ConnectBus, monkeypatch: pytest.MonkeyPatch, hears_news: bool
) -> None:
    """A worker is asked at its first heartbeat or event: a new placement sent prompts elsewhere until its
    next tick."""
    monkeypatch.setattr(placing, "_TICK_S", 600.0)
    bus = await connect_bus("placement", "placement-0")
    placement = Placement(bus, PlacementConfig(), create("prefix_aware"))
    worker, caching = await connect_bus("worker", "w0"), Caching()
    await worker.attach(Caching.HANDLERS, caching)
    prefixes = placement.fleet.prefixes

    async def placed(request: str, *names: int) -> str | None:
        asked = item(request, size=100, limit=200, prefixes=(chain(*names),))
        return (await placement.place(PlaceSequences(items=(asked,)))).worker_ids[0]

    async with serving(bus, placement):
        for name in ("w0", "w1"):
            heard = msgspec.structs.replace(report(name), caches_prefixes=not hears_news and name == "w0")
            await worker.publish(subjects.worker_reported(name), heard)
        await until(lambda: len(placement.fleet.workers) == 2)
        if hears_news:
            await worker.publish(subjects.worker_cached("w0"), news(7, 1))
        await until(lambda: prefixes.blocks("w0") == 3)
        assert [(q.incarnation, q.since_seq) for q in caching.asked] == [(1, 0)]
        assert await placed("a", 1, 2, 9) == "w0"
        assert await placed("b", *range(20, 26)) == "w1", "no worker has it: to the emptiest"
        assert await placed("c", *range(20, 26)) == "w1", "it is about to be computed there"
        await worker.publish(subjects.worker_cached("w0"), news(9, 30))
        await until(lambda: prefixes.blocks("w0") == 4)
        assert len(caching.asked) == 1, "no gap, no question"


async def test_a_prompt_leaves_its_shard_for_a_long_prefix_only(connect_bus: ConnectBus) -> None:
    """`worker-0` and `worker-1` are in shard 0 of 2, `worker-2` in shard 1."""
    bus = await connect_bus("placement", "placement-0")

    def make(model: str, shard: Shard) -> Placement:
        return Placement(bus, PlacementConfig(), create("prefix_aware"), model=model, shard=shard)

    asked = item("a", size=1600, limit=1700, prefixes=(chain(*range(100)),))
    async with asyncio.TaskGroup() as tasks:
        models = PlacementModels(bus, make, tasks)
        for name in ("worker-0", "worker-1", "worker-2"):
            models.on_reported(report(name, total=200, caches_prefixes=True, prefill_tokens_per_s=1000.0))

        async def placed(shard: int, shards: int = 2, **fields: Any) -> str | None:
            items = (msgspec.structs.replace(asked, **fields),)
            question = PlaceSequences(items=items, shard=shard, shards=shards, model="m")
            return (await models.place(question)).worker_ids[0]

        first: dict[str, Any] = {"prefixes": (), "size_tokens": 16, "ref": item("first").ref}
        assert await placed(0, **first) in ("worker-0", "worker-1")
        assert await placed(1, **first) == "worker-2"
        for shard, worker in ((0, "worker-0"), (1, "worker-2")):
            fleet = models._models["m"][shard].fleet
            fleet.prefixes.on_answer(news(1, *range(10 if shard == 0 else 90), worker_id=worker, full=True))
        assert await placed(0) == "worker-2", "most of it is cached there"
        assert await placed(0, is_bound=True) in ("worker-0", "worker-1")
        assert await placed(1) == "worker-2"
        assert await placed(0, shards=1) is None, "schedulers contradict each other"
        for watching in models._watching:
            watching.cancel()


async def test_prompts_go_to_workers_that_may_compute_them(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("placement", "placement-0")
    placement = RolePlacement(bus, PlacementConfig(roles="prefill,decode"), create("prefix_aware"))
    for name in ("w0", "w1"):
        placement.on_reported(report(name))
    items = tuple(item(f"r{number}") for number in range(6))
    assert set((await placement.place(PlaceSequences(items=items))).worker_ids) == {"w0"}
    moved = PlaceSequences(items=(item("moved"),), excluded_workers=("w0",), are_placed=True)
    assert (await placement.place(moved)).worker_ids == ("w1",), "it is there already, whatever the role"
    assert [row["role"] for row in placement.details()["workers"]] == ["prefill", "decode"]


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


@pytest.mark.parametrize("refuses", [0, 1])
async def test_one_of_two_half_empty_workers_is_parked(connect_bus: ConnectBus, refuses: int) -> None:
    bus = await connect_bus("placement", "placement-0")
    placement = PackingPlacement(bus, PACKING)
    peer, scheduler = await connect_bus("scheduler", "scheduler-0"), Scheduler(refuses)
    await peer.attach(Scheduler.HANDLERS, scheduler)
    async with serving(bus, placement):
        for number in range(2):
            here = (listed(f"r{number}", prompt=150, blocks=10),)
            await peer.publish(subjects.worker_reported(f"w{number}"), report(f"w{number}", sequences=here))
        await until(lambda: bool(scheduler.orders))
        if refuses:
            await until(lambda: placement.packer.counts["failed"] >= 1)
            placement.packer.check_integrity()
            return
        order = scheduler.orders[0]
        source = {"w0": "w1", "w1": "w0"}[order.target]
        both = (listed("r0", prompt=150, blocks=10, attempt=2), listed("r1", prompt=150, blocks=10))
        await peer.publish(subjects.worker_reported(source), report(source, seq=2))
        await peer.publish(
            subjects.worker_reported(order.target), report(order.target, seq=2, sequences=both)
        )
        moved = SequenceMoved(ref=order.ref, source=source, target=order.target)
        await peer.publish(subjects.SCHEDULER_MOVED, moved)
        await until(lambda: any(source in event.parked for event in scheduler.wanted))
        assert scheduler.wanted[-1].wanted == 1
        status = await status_of(peer)
    states = {row["worker"]: row["state"] for row in status.details["workers"]}
    assert states[source] == "retired" and states[order.target] in "TSML"
    assert status.details["moves_ordered"] >= 1


async def test_each_model_publishes_its_wanted_workers(
    connect_bus: ConnectBus, bus_config: BusConfig
) -> None:
    """One model's workers are idle and parked; the other's work, and all of them are wanted."""
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

    async with running(run(PACKING.model_copy(update={"bus": bus_config}))):
        async with asyncio.timeout(PATIENCE_S):
            while not await heard():
                pass
        idle, busy = last("idle"), last("busy")
        assert idle is not None and busy is not None and (idle.wanted, busy.wanted, busy.parked) == (1, 2, ())
        status = await status_of(peer)
    assert status.details["wanted_workers"] == 3
    shown = {row["model"]: (row["wanted_workers"], row["parked"]) for row in status.details["models"]}
    assert shown == {"idle": (1, "w1"), "busy": (2, "")}
