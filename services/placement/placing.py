"""Placement for each served model: answers `PlaceSequences` from worker heartbeats and prefix-cache events.

All state is soft. After a restart, one round of heartbeats and one prefix query per worker rebuild it.
`relocation.py` (a packing policy) and `role_keeping.py` (roles) extend `Placement`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from services.placement.config import PlacementConfig
from services.placement.core.fleet import FleetCapacity
from services.placement.core.orders import find_order
from services.placement.policy.contract import PlacementPolicy
from shared import subjects
from shared.bus import Bus, fenced, status_of
from shared.clock import Clock, monotonic_s
from shared.errors import InvalidMessage, InvalidRequest, KvasirError
from shared.liveness import AwakeClock
from shared.log import canonical, detail, get_logger
from shared.messages.base import Empty
from shared.messages.commands import Placements, PlaceSequences
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, SequenceMoved
from shared.messages.plans import WorkerStepped
from shared.messages.prefixes import FindPrefixes, WorkerPrefixes
from shared.messages.reports import ServiceStatus, WorkerReported
from shared.messages.sequence import SequenceRef
from shared.plugins import PluginFaults

MOST_MODELS = 64
_TICK_S = 0.5
_ANSWER_DEADLINE_S = 1.0

_log = get_logger("placement")


class Placement:
    """Places the sequences of one model: heartbeats feed the fleet, and the policy answers requests."""

    def __init__(
        self,
        bus: Bus,
        config: PlacementConfig,
        policy: PlacementPolicy | None,
        clock: Clock = monotonic_s,
        model: str = "",
    ) -> None:
        """`policy` is None if a subclass chooses without one."""
        self._bus, self._config, self._policy, self._model = bus, config, policy, model
        self.fleet = FleetCapacity(silence_s=config.worker_timeout_s, order=find_order(config.order))
        self._clock = AwakeClock(clock, lambda: bus.connected)
        self._faults = PluginFaults()
        self._placed = self._waits = self._questions = 0
        self._missed = asyncio.Event()

    def on_reported(self, report: WorkerReported) -> None:
        known = self.fleet.workers.get(report.worker_id)
        self.fleet.on_reported(report, self._clock())
        if known is None or known.report.incarnation != report.incarnation:
            self._missed.set()  # Ask now for its cached prefixes: prompts wait for no tick.

    def on_stepped(self, stepped: WorkerStepped) -> None:
        self.fleet.on_stepped(stepped)

    def on_gone(self, worker_id: str, incarnation: int) -> None:
        """Drop a worker that left the bus."""
        if self.fleet.on_gone(worker_id, incarnation):
            canonical(_log, "worker dropped", worker=worker_id)

    def on_cached(self, news: WorkerPrefixes) -> None:
        self.fleet.prefixes.on_news(news)
        self._missed.set()

    def on_moved(self, moved: SequenceMoved) -> None:
        """Take in the outcome of a move; subclasses order moves."""

    async def place(self, asked: PlaceSequences) -> Placements:
        """Return one worker id per item; None means wait. Raises PolicyFailed if the policy raises."""
        self.fleet.on_withdrawn(asked.withdrawn)
        worker_ids = self._choose(asked, frozenset(asked.excluded_workers))
        waits = worker_ids.count(None)
        self._placed += len(worker_ids) - waits
        self._waits += waits
        expected: dict[SequenceRef, int] = {}
        for choice in self.fleet.choices:
            expected[choice.item.ref] = choice.expected_tokens
            detail(
                _log,
                "route",
                ref=str(choice.item.ref),
                worker=choice.worker_id,
                prompt_tokens=choice.item.size_tokens,
                expected_tokens=choice.expected_tokens,
                costs_s={name: round(cost_s, 4) for name, cost_s in choice.costs_s} or None,
            )
        expected_tokens = tuple([expected.get(item.ref, 0) for item in asked.items])
        return Placements(worker_ids=worker_ids, expected_tokens=expected_tokens)

    def _choose(self, asked: PlaceSequences, excluded: frozenset[str]) -> tuple[str | None, ...]:
        """Return one worker id per item. Raises PolicyFailed."""
        assert self._policy is not None
        try:
            return self.fleet.place(asked.items, excluded, self._policy, self._clock(), asked.ahead)
        except Exception as error:  # a plug-in policy may raise anything
            name = f"placement policy {self._config.policy}"
            raise self._faults.note(name, "choose", error, monotonic_s()) from error

    async def _order(self, orders: tuple[SequenceMove, ...]) -> list[tuple[SequenceMove, str]]:
        """Order moves; return those that the scheduler refused, with reasons. No reply is a refusal."""
        command = MoveSequences(moves=orders)
        try:
            answer = await self._bus.request(
                subjects.SCHEDULER_MOVE, command, MovesTaken, deadline_s=_ANSWER_DEADLINE_S
            )
            refusals = answer.refusals
        except KvasirError as error:
            refusals = (error.message,) * len(orders)
        refused = [pair for pair in zip(orders, refusals, strict=False) if pair[1]]
        for order, refusal in refused:
            _log.info("%s does not move to %s: %s", order.ref, order.target, refusal)
        return refused

    async def watch(self) -> None:
        """Drop silent workers and query workers with a gap in their prefix events, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._catch_up())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._missed.set()
            with fenced("placement tick"):
                for worker_id in self.fleet.on_tick(self._clock()):
                    canonical(_log, "worker dropped", worker=worker_id)

    async def _catch_up(self) -> None:
        while True:
            await self._missed.wait()
            self._missed.clear()
            for worker_id, question in list(self.fleet.prefixes.questions(self._clock())):
                with fenced("prefix question"):
                    await self._ask(worker_id, question)

    async def _ask(self, worker_id: str, question: FindPrefixes) -> None:
        """Ask one worker for its cached prefixes. A worker that fails to answer is asked again later."""
        subject = subjects.worker_prefixes(worker_id)
        try:
            answer = await self._bus.request(subject, question, WorkerPrefixes, deadline_s=_ANSWER_DEADLINE_S)
            if answer.worker_id != worker_id:
                raise InvalidMessage(f"{worker_id} answers as {answer.worker_id!r}")
        except KvasirError as error:
            _log.info("%s did not say what it has cached: %s", worker_id, error)
            return
        self._questions += 1
        self.fleet.prefixes.on_answer(answer)

    def details(self) -> dict[str, Any]:
        """Return the fields for `python -m services status`."""
        return {
            "policy": self._config.policy,
            "trouble": self._faults.text(monotonic_s()),
            "order": self._config.order,
            "placed": self._placed,
            "waits": self._waits,
            "prefix_questions": self._questions,
            "workers": [
                {
                    "worker": name,
                    "total_tokens": worker.report.capacity.total_blocks * worker.report.block_tokens,
                    "free_tokens": worker.free_blocks * worker.report.block_tokens,
                    "sequences": len(worker.residents),
                    "reserved": len(worker.reservations),
                    "cached_blocks": self.fleet.prefixes.blocks(name),
                }
                for name, worker in sorted(self.fleet.workers.items())
            ],
        }


class PlacementModels:
    """Message handlers that pass each message to the `Placement` of its model. A model's placement starts
    with its first worker. Workers of models beyond `MOST_MODELS` are not used."""

    def __init__(self, bus: Bus, make: Callable[[str], Placement], tasks: asyncio.TaskGroup) -> None:
        """`make` creates the placement of a model by name; `tasks` runs its `watch`."""
        self._bus, self._make, self._tasks = bus, make, tasks
        self._models: dict[str, Placement] = {}
        self._of_worker: dict[str, Placement] = {}
        self._started_s = monotonic_s()

    def on_reported(self, report: WorkerReported) -> None:
        self._bus.departures.on_listening(report.worker_id, report.incarnation, report.door)
        placement = self._models.get(report.model)
        if placement is None and len(self._models) < MOST_MODELS:
            placement = self._models[report.model] = self._make(report.model)
            self._tasks.create_task(placement.watch())
            canonical(_log, "model", name=report.model, models=len(self._models))
        if placement is not None:
            self._of_worker[report.worker_id] = placement
            placement.on_reported(report)

    def on_stepped(self, stepped: WorkerStepped) -> None:
        if (placement := self._of_worker.get(stepped.worker_id)) is not None:
            placement.on_stepped(stepped)

    def on_gone(self, instance: str, incarnation: int) -> None:
        """Drop a worker that left the bus."""
        if (placement := self._of_worker.get(instance)) is not None:
            placement.on_gone(instance, incarnation)

    def on_cached(self, news: WorkerPrefixes) -> None:
        if (placement := self._of_worker.get(news.worker_id)) is not None:
            placement.on_cached(news)

    def on_moved(self, moved: SequenceMoved) -> None:
        if (placement := self._of_worker.get(moved.target)) is not None:
            placement.on_moved(moved)

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

    async def status(self, _: Empty) -> ServiceStatus:
        """Return the status of the only model, or sums with one row per model and all workers."""
        models = self._models or {"": self._make("")}
        details = _merged({name: placement.details() for name, placement in models.items()})
        return status_of(self._bus, "placement", monotonic_s() - self._started_s, details)


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
