"""Two workers on a real nats-server: one fetches blocks of the other, which measures the link."""

import asyncio
from pathlib import Path

from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.peers.migration.target import DeviceShelf
from services.worker.service import Worker
from shared import subjects
from shared.blocks import chain, root
from shared.bus import Listener
from shared.messages.moves import BlocksPulled, PullBlocks
from shared.messages.plans import BatchPlan, PrefillChunk
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import pack_tokens
from tests.conftest import ConnectBus
from tests.services.worker.peers.migration.rig import EngineDoor
from tests.services.worker.prefix_rig import BLOCK_TOKENS, DEVICE_BLOCKS, PrefixRig
from tests.services.worker.prefix_rig import make_engine as make_prefix_engine
from tests.shared.messages.builders import ref, spec

TOKENS = list(range(2, 50))
WITHIN_S = 30.0
NAMED = ("worker-0", "worker-1")


class Heard:
    def __init__(self) -> None:
        self.reports: dict[str, WorkerReported] = {}

    def on_reported(self, report: WorkerReported) -> None:
        self.reports[report.worker_id] = report


async def test_blocks_are_fetched_and_the_link_is_measured(
    connect_bus: ConnectBus, model_folder: Path
) -> None:
    scheduler, gateway = await connect_bus("scheduler", "scheduler-0"), await connect_bus("gateway", "g")
    heard = Heard()
    await scheduler.attach([Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported")], heard)
    serving = []
    for name in NAMED:
        config = WorkerConfig(model=str(model_folder), kv_blocks=64, block_tokens=4, heartbeat_s=0.05)
        bus = await connect_bus("worker", name)
        serving.append(asyncio.create_task(Worker(bus, config, make_engine(config)).serve()))
    async with asyncio.timeout(WITHIN_S):
        while not all(name in heard.reports and heard.reports[name].kv_block_bytes for name in NAMED):
            await asyncio.sleep(0.05)
    assert not heard.reports["worker-1"].link_bytes_per_s, "peers are dialled on demand"
    asked = spec(ref("req"), TOKENS, max_tokens=1, gateway_id="g")
    await gateway.publish(subjects.gateway_reported("g"), GatewayReported(gateway_id="g", incarnation=1))
    chunk = PrefillChunk(ref=asked.ref, first_token=0, end_token=len(TOKENS), allocated_blocks=13)
    plan = BatchPlan(epoch=1, seq=1, starts=(asked,), prefills=(chunk,))
    await scheduler.publish(subjects.worker_plan("worker-0"), plan)
    order = PullBlocks(
        source="worker-0",
        source_incarnation=heard.reports["worker-0"].incarnation,
        tokens=pack_tokens(TOKENS),
    )
    pulled = BlocksPulled(held_tokens=0)
    async with asyncio.timeout(WITHIN_S):
        while pulled.held_tokens < len(TOKENS):
            pulled = await scheduler.request(
                subjects.worker_pull("worker-1"), order, BlocksPulled, deadline_s=10.0
            )
            await asyncio.sleep(0.02)
    assert pulled.fetched_blocks == 12
    async with asyncio.timeout(WITHIN_S):
        while set(heard.reports["worker-1"].link_bytes_per_s) != {"worker-0"}:
            await asyncio.sleep(0.05)
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


NAMES = chain(root(b"f"), pack_tokens(range(8 * BLOCK_TOKENS)), BLOCK_TOKENS)


async def test_blocks_are_published_after_they_arrived_and_as_much_room_stays_free() -> None:
    rig, door = PrefixRig(make_prefix_engine(), PrefixCacheConfig()), EngineDoor()
    assert rig.store is not None
    cache, shelf = rig.store.cache, DeviceShelf(door, rig.store, 2, rig.engine.records())
    blocks = await shelf.make_room(4, ())
    assert await asyncio.wrap_future(shelf.take_in(blocks, NAMES[:3], None)) == 3, "the fourth did not arrive"
    assert await asyncio.wrap_future(shelf.known(NAMES)) == 3
    assert cache.free_blocks + cache.evictable_blocks == DEVICE_BLOCKS
    more = await shelf.make_room(2, ())
    arrived = shelf.take_in(more, NAMES[5:7], NAMES[4])
    assert await asyncio.wrap_future(arrived) == 0, "what precedes them is not there"
    assert cache.free_blocks + cache.evictable_blocks == DEVICE_BLOCKS
    assert await shelf.make_room(DEVICE_BLOCKS // 2 + 1, ()) == []
    assert len(await shelf.make_room(DEVICE_BLOCKS // 2, ())) == DEVICE_BLOCKS // 2
    door.close()
    rig.store.close(5.0)
