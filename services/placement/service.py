"""Placement on the bus: answers `PlaceSequences` from workers' heartbeats.

Soft state: one round of heartbeats after a restart rebuilds it. It knows no request beyond its size.
"""

import asyncio

from services.placement.config import PlacementConfig
from services.placement.policy import create
from services.placement.policy.base import PlacementPolicy
from services.placement.state import Fleet
from shared import subjects
from shared.bus import Bus, Endpoint, Gatherable, Handler, Listener
from shared.clock import Clock, monotonic_s
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import Placements, PlaceSequences
from shared.messages.plans import WorkerStepped
from shared.messages.reports import ServiceStatus, WorkerReported

HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
    Endpoint(subjects.PLACEMENT_PLACE, PlaceSequences, "place", concurrency=1),
    Gatherable(subjects.status("placement"), Empty, "status"),
)
_TICK_S = 0.5

_log = get_logger("placement")


class Placement:
    """A fleet's books and the policy that chooses among workers with room."""

    def __init__(
        self, bus: Bus, config: PlacementConfig, policy: PlacementPolicy, clock: Clock = monotonic_s
    ) -> None:
        self._bus = bus
        self._policy = policy
        self._policy_name = config.policy
        self.fleet = Fleet(silence_s=config.worker_timeout_s, reservation_s=config.reservation_s)
        self._clock = clock
        self._started_s = clock()
        self._placed = 0
        self._waits = 0

    def on_reported(self, report: WorkerReported) -> None:
        self.fleet.on_reported(report, self._clock())

    def on_stepped(self, stepped: WorkerStepped) -> None:
        self.fleet.on_stepped(stepped)

    async def place(self, asked: PlaceSequences) -> Placements:
        """A worker id per item, in order; None says wait."""
        excluded = frozenset(asked.excluded_workers)
        worker_ids = self.fleet.place(asked.items, excluded, self._policy, self._clock())
        waits = sum(worker_id is None for worker_id in worker_ids)
        self._placed += len(worker_ids) - waits
        self._waits += waits
        return Placements(worker_ids=worker_ids)

    async def watch(self) -> None:
        """Drops workers that fell silent."""
        while True:
            await asyncio.sleep(_TICK_S)
            for worker_id in self.fleet.on_tick(self._clock()):
                canonical(_log, "worker dropped", worker=worker_id)

    async def status(self, _: Empty) -> ServiceStatus:
        """What `python -m services status` shows."""
        workers = sorted(self.fleet.workers.values(), key=lambda worker: worker.worker_id)
        return ServiceStatus(
            service="placement",
            instance=self._bus.instance,
            incarnation=self._bus.incarnation,
            uptime_s=self._clock() - self._started_s,
            details={
                "policy": self._policy_name,
                "placed": self._placed,
                "waits": self._waits,
                "workers": [
                    {
                        "worker": worker.worker_id,
                        "total_tokens": worker.total_blocks * worker.block_tokens,
                        "free_tokens": worker.free_blocks * worker.block_tokens,
                        "sequences": len(worker.residents),
                        "reserved": len(worker.reservations),
                    }
                    for worker in workers
                ],
            },
        )


async def run(config: PlacementConfig) -> None:
    """Serves until cancelled. Raises ConfigError (unknown policy) and BusUnavailable (no NATS at start)."""
    policy = create(config.policy)
    bus = await Bus.connect(config.bus, service="placement", instance=config.instance)
    try:
        placement = Placement(bus, config, policy)
        await bus.attach(HANDLERS, placement)
        canonical(_log, "placement serving", policy=config.policy)
        await placement.watch()
    finally:
        await bus.close()
