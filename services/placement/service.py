"""Placement on the bus: subscriptions, and one `Placement` per served model."""

import asyncio

from services.placement.config import PlacementConfig
from services.placement.core.roles import are_on
from services.placement.placing import Placement, PlacementModels
from services.placement.policy import LIVE_PACKINGS, create
from services.placement.relocation import PackingPlacement
from services.placement.role_keeping import RolePlacement
from shared import subjects
from shared.bus import Bus, Endpoint, Handler, Listener, recorder_handlers, status_handlers
from shared.log import canonical, get_logger
from shared.messages.commands import PlaceSequences
from shared.messages.moves import SequenceMoved
from shared.messages.plans import WorkerStepped
from shared.messages.prefixes import WorkerPrefixes
from shared.messages.reports import WorkerReported
from shared.shards import Shard

HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported", sender="worker_id"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped", sender="worker_id"),
    Listener(subjects.ANY_WORKER_CACHED, WorkerPrefixes, "on_cached", sender="worker_id"),
    Endpoint(subjects.PLACEMENT_PLACE, PlaceSequences, "place", concurrency=1, queue="placement"),
    *status_handlers("placement"),
)
MOVE_HANDLERS: tuple[Handler, ...] = (Listener(subjects.SCHEDULER_MOVED, SequenceMoved, "on_moved"),)
_log = get_logger("placement")


async def run(config: PlacementConfig) -> None:
    """Serve until cancelled. Raises ConfigError (unknown policy) and BusUnavailable (no NATS at start)."""
    is_packing, has_roles = config.policy in LIVE_PACKINGS, are_on(config.roles)

    def make(model: str, shard: Shard) -> Placement:
        if is_packing:
            return PackingPlacement(bus, config, model=model, shard=shard)
        kind = RolePlacement if has_roles else Placement
        return kind(bus, config, create(config.policy), model=model, shard=shard)

    config.check()
    bus = await Bus.connect(config.bus, service="placement", instance=config.instance)
    try:
        async with asyncio.TaskGroup() as tasks, bus.served_within():
            models = PlacementModels(bus, make, tasks)
            await bus.attach(HANDLERS, models)
            await bus.attach(recorder_handlers("placement"), bus.recorder)
            await bus.watch_departures(models.on_gone)
            if is_packing or has_roles:
                await bus.attach(MOVE_HANDLERS, models)
            canonical(_log, "placement serving", policy=config.policy)
            await asyncio.Event().wait()
    finally:
        await bus.close()
