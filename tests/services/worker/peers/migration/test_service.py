"""Two workers on a real nats-server find each other, measure the way, and one fetches what the other has."""

import asyncio
from pathlib import Path

from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.service import Worker
from shared import subjects
from shared.bus import Listener
from shared.messages.moves import BlocksPulled, PullBlocks
from shared.messages.plans import BatchPlan, PrefillChunk
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens
from tests.conftest import ConnectBus

TOKENS = list(range(2, 50))
WITHIN_S = 30.0


class Heard:
    def __init__(self) -> None:
        self.reports: dict[str, WorkerReported] = {}

    def on_reported(self, report: WorkerReported) -> None:
        self.reports[report.worker_id] = report


async def test_blocks_go_over_and_the_way_is_measured(connect_bus: ConnectBus, model_folder: Path) -> None:
    scheduler, gateway = await connect_bus("scheduler", "scheduler-0"), await connect_bus("gateway", "g")
    heard = Heard()
    await scheduler.attach([Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported")], heard)
    serving = []
    for name in ("worker-0", "worker-1"):
        config = WorkerConfig(model=str(model_folder), kv_blocks=64, block_tokens=4, heartbeat_s=0.05)
        bus = await connect_bus("worker", name)
        serving.append(asyncio.create_task(Worker(bus, config, make_engine(config)).serve()))
    async with asyncio.timeout(WITHIN_S):
        while not all(name != "worker-0" or one.kv_block_bytes for name, one in heard.reports.items()) or (
            len(heard.reports) < 2 or not heard.reports["worker-1"].link_bytes_per_s
        ):
            await asyncio.sleep(0.05)
    spec = SequenceSpec(
        ref=SequenceRef(request_id="req", choice=0, attempt=1),
        gateway_id="g",
        gateway_incarnation=1,
        prompt=pack_tokens(TOKENS),
        sampling=Sampling(seed=0, max_tokens=1, temperature=0.0),
    )
    await gateway.publish(subjects.gateway_reported("g"), GatewayReported(gateway_id="g", incarnation=1))
    chunk = PrefillChunk(ref=spec.ref, first_token=0, end_token=len(TOKENS), allocated_blocks=13)
    plan = BatchPlan(epoch=1, seq=1, starts=(spec,), prefills=(chunk,))
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
    assert set(heard.reports["worker-1"].link_bytes_per_s) == {"worker-0"}
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
