"""One `Placement` per model of the fleet: each places, packs and moves among its own workers."""

import asyncio
from collections.abc import Callable
from typing import Any

from services.placement.placing import Placement
from shared.bus import Bus, status_of
from shared.clock import monotonic_s
from shared.errors import InvalidRequest
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import Placements, PlaceSequences
from shared.messages.moves import SequenceMoved
from shared.messages.plans import WorkerStepped
from shared.messages.prefixes import WorkerPrefixes
from shared.messages.reports import ServiceStatus, WorkerReported

MOST_MODELS = 64
_log = get_logger("placement")


class PlacementModels:
    """Message handlers that pass each message to the `Placement` of its model. A model's placement starts
    with its first worker. Workers of models beyond `MOST_MODELS` are not used."""

    def __init__(self, bus: Bus, make: Callable[[str], Placement], tasks: asyncio.TaskGroup) -> None:
        """`make` creates the placement of a model by name; `tasks` runs its `watch`."""
        self._bus = bus
        self._make = make
        self._tasks = tasks
        self._models: dict[str, Placement] = {}
        self._model_of: dict[str, str] = {}
        """Model name by worker."""
        self._started_s = monotonic_s()

    def on_reported(self, report: WorkerReported) -> None:
        self._bus.departures.on_listening(report.worker_id, report.incarnation, report.door)
        placement = self._models.get(report.model)
        if placement is None and len(self._models) < MOST_MODELS:
            placement = self._models[report.model] = self._make(report.model)
            self._tasks.create_task(placement.watch())
            canonical(_log, "model", name=report.model, models=len(self._models))
        if placement is not None:
            self._model_of[report.worker_id] = report.model
            placement.on_reported(report)

    def on_stepped(self, stepped: WorkerStepped) -> None:
        if (placement := self._of_worker(stepped.worker_id)) is not None:
            placement.on_stepped(stepped)

    def on_gone(self, instance: str, incarnation: int) -> None:
        """Drop a worker that left the bus."""
        if (placement := self._of_worker(instance)) is not None:
            placement.on_gone(instance, incarnation)

    def on_cached(self, news: WorkerPrefixes) -> None:
        if (placement := self._of_worker(news.worker_id)) is not None:
            placement.on_cached(news)

    def on_moved(self, moved: SequenceMoved) -> None:
        placement = self._of_worker(moved.target)
        if placement is not None and placement.relocation is not None:
            placement.relocation.on_moved(moved)
        if placement is not None and placement.keeping is not None:
            placement.keeping.on_moved(moved)

    async def place(self, asked: PlaceSequences) -> Placements:
        """See `Placement.place`. Raises InvalidRequest if the request has to name one of several models."""
        name = asked.model
        if not name and len(self._models) == 1:
            (name,) = self._models
        if not name and self._models:
            raise InvalidRequest("there are several models: say of which it is", param="model")
        placement = self._models.get(name)
        if placement is None:
            return Placements(worker_ids=(None,) * len(asked.items))
        return await placement.place(asked)

    async def status(self, asked: Empty) -> ServiceStatus:
        """Return the status of the only model, or sums with one row per model and all workers."""
        if not self._models:
            return await self._make("").status(asked)
        told = {name: await placement.status(asked) for name, placement in self._models.items()}
        return status_of(
            self._bus,
            "placement",
            monotonic_s() - self._started_s,
            _merged({name: status.details for name, status in told.items()}),
        )

    def _of_worker(self, worker_id: str) -> Placement | None:
        return self._models.get(self._model_of.get(worker_id, ""))


def _merged(details: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if len(details) == 1:
        return next(iter(details.values()))
    found: dict[str, Any] = {"models": [], "workers": []}
    for model, each in details.items():
        found["workers"] += [{**row, "model": model} for row in each["workers"]]
        own = {name: value for name, value in each.items() if name != "workers"}
        found["models"].append({"model": model, **own})
        found["trouble"] = found.get("trouble") or own.get("trouble", "")
        for name, value in own.items():
            if isinstance(value, int):
                found[name] = found.get(name, 0) + value
            elif isinstance(value, str):  # a setting, equal for all models
                found[name] = value
    return found
