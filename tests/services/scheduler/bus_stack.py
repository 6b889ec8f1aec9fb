"""The scheduler and its scripted peers, each on a bus of its own, and helpers to run and wait."""

from typing import Any

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService
from shared import subjects
from shared.bus import Bus
from shared.config import BusConfig
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus
from tests.conftest import ConnectBus
from tests.services.scheduler.bus_peers import PlacementOnBus, PredictorOnBus, Reader, WorkerOnBus

QUICK = {"lease_ttl_s": 1.0, "worker_timeout_s": 0.6}


class BusStack:
    """Gateway's ears, placement and predictor are there from `start`; workers and schedulers come one by
    one."""

    def __init__(self, connect: ConnectBus, bus_config: BusConfig) -> None:
        self._connect, self._bus_config = connect, bus_config
        self.predictor = PredictorOnBus()
        self.placement = PlacementOnBus("worker-0")
        self.reader: Reader
        self.peers: Bus

    async def start(self) -> None:
        bus = await self._connect("gateway", "gateway-0")
        self.reader = Reader(bus)
        await bus.attach(Reader.HANDLERS, self.reader)
        self.peers = await self._connect("peers", "peers-0")
        await self.peers.attach(PlacementOnBus.HANDLERS, self.placement)
        await self.peers.attach(PredictorOnBus.HANDLERS, self.predictor)

    async def worker(self, worker_id: str = "worker-0") -> WorkerOnBus:
        return WorkerOnBus(await self._connect("worker", worker_id))

    async def scheduler(self, instance: str = "scheduler-0", **settings: Any) -> SchedulerService:
        config = SchedulerConfig(instance=instance, bus=self._bus_config, **(QUICK | settings))
        return SchedulerService(config, await self._connect("scheduler", instance))

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """Details by instance, of every scheduler that answers."""
        found = await self.reader.bus.gather(
            subjects.status("scheduler"), Empty(), ServiceStatus, deadline_s=0.3
        )
        return {status.instance: status.details for status in found}
