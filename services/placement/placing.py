"""Placement for each served model: answers `PlaceSequences` from worker heartbeats and prefix-cache events.

All state is soft. After a restart, one round of heartbeats and one prefix query per worker rebuild it.
`relocation.py` (a packing policy) and `role_keeping.py` (roles) extend `Placement`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any

from services.placement.config import PlacementConfig
from services.placement.core.fleet import FleetCapacity
from services.placement.core.orders import LEAST_SHARE, find_order
from services.placement.core.seats import SeatChoice
from services.placement.policy.contract import CostedPolicy, PlacementPolicy
from shared import subjects
from shared.bus import Bus, fenced, status_of
from shared.clock import Clock, monotonic_s
from shared.errors import InvalidMessage, InvalidRequest, KvasirError
from shared.liveness import AwakeClock
from shared.log import canonical, detail, get_logger
from shared.messages.base import Empty
from shared.messages.commands import PlacementItem, Placements, PlaceSequences
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, SequenceMoved
from shared.messages.plans import WorkerStepped
from shared.messages.prefixes import FindPrefixes, WorkerPrefixes
from shared.messages.reports import ServiceStatus, WorkerReported
from shared.messages.sequence import SequenceRef
from shared.plugins import PluginFaults
from shared.shards import MOST_SHARDS, WHOLE, Shard, shard_of

MOST_MODELS = 64
_TICK_S = 0.5
_ANSWER_DEADLINE_S = 1.0
_HAND_OVER_S = 0.02
"""Cost of giving a sequence to another shard."""
_DIVIDED_S = 5.0
"""Least time until a smaller number of shards counts."""

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
        shard: Shard = WHOLE,
    ) -> None:
        """`policy` is None if a subclass chooses without one. `shard`: the one of all its workers."""
        self._bus, self._config, self._policy, self._model = bus, config, policy, model
        self._shard = shard
        self._excluded: frozenset[str] = frozenset()
        """Workers that the scheduler excluded last."""
        self.fleet = FleetCapacity(silence_s=config.worker_timeout_s, order=find_order(config.order))
        self._clock = AwakeClock(clock, lambda: bus.connected)
        self._faults = PluginFaults()
        self._placed = self._waits = self._questions = self._elsewhere = 0
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

    async def place(self, asked: PlaceSequences, others: Sequence["Placement"] = ()) -> Placements:
        """Return one worker id per item; None means wait. Raises PolicyFailed if the policy raises. `others`:
        of the model's other shards, to whose cached prefixes items may go."""
        self.fleet.on_withdrawn(asked.withdrawn)
        excluded = frozenset(asked.excluded_workers)
        worker_ids = self._choose(asked, excluded)
        if not asked.are_placed:
            self._excluded = excluded
            if others:
                worker_ids = self._to_prefixes(asked.items, worker_ids, others)
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

    def _to_prefixes(
        self, items: Sequence[PlacementItem], worker_ids: Sequence[str | None], others: Sequence["Placement"]
    ) -> tuple[str | None, ...]:
        """Return the choices, each replaced where another shard's cached prefix makes that cheaper."""
        own = {choice.item.ref: choice for choice in self.fleet.choices}
        found = list(worker_ids)
        for at, item in enumerate(items):
            if item.is_bound or not item.prefixes:
                continue
            choice, now_s = own.get(item.ref), self._clock()
            offers = [(other, offer) for other in others if (offer := other.offer(item, now_s)) is not None]
            if not offers:
                continue
            other, offer = min(offers, key=lambda pair: pair[1].cost_s)
            expected, cost_s = (0, inf) if choice is None else (choice.expected_tokens, choice.cost_s)
            more_tokens = offer.expected_tokens - expected
            if more_tokens >= LEAST_SHARE * item.size_tokens and offer.cost_s + _HAND_OVER_S < cost_s:
                self.fleet.on_withdrawn([item.ref])
                other.fleet.promise(offer, now_s)
                found[at] = offer.worker_id
                self.fleet.choices = [one for one in self.fleet.choices if one is not choice] + [offer]
                self._elsewhere += 1
        return tuple(found)

    def offer(self, item: PlacementItem, now_s: float) -> SeatChoice | None:
        """Return the cheapest worker with room now, if the policy knows costs and some prefix is cached."""
        if not isinstance(self._policy, CostedPolicy):
            return None
        return self.fleet.offer(item, self._excluded, self._policy, now_s)

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
                subjects.moves_in(self._shard.number), command, MovesTaken, deadline_s=_ANSWER_DEADLINE_S
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
            tasks.create_task(self._every(_TICK_S, "placement tick", self._tick))
            tasks.create_task(self._catch_up())

    async def _every(self, interval_s: float, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do this after each interval, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            with fenced(what):
                await work()

    async def _tick(self) -> None:
        self._missed.set()
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
            **({} if self._shard.count == 1 else {"to_other_shards": self._elsewhere}),
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
    """Message handlers that pass each message to the `Placement` of its model and shard, which starts with
    its first worker. Workers of models beyond `MOST_MODELS` are not used."""

    def __init__(self, bus: Bus, make: Callable[[str, Shard], Placement], tasks: asyncio.TaskGroup) -> None:
        """`make` creates the placement of a model, by name, in a shard; `tasks` runs its `watch`."""
        self._bus, self._make, self._tasks = bus, make, tasks
        self._models: dict[str, dict[int, Placement]] = {}
        """By model and shard."""
        self._watching: list[asyncio.Task[None]] = []
        self._shards, self._divided_s = 1, monotonic_s()
        """Number of shards, and when a scheduler asked for one of them last."""
        self._of_worker: dict[str, Placement] = {}
        self._started_s = monotonic_s()

    def on_reported(self, report: WorkerReported) -> None:
        self._bus.departures.on_listening(report.worker_id, report.incarnation, report.door)
        shard = Shard(shard_of(report.worker_id, self._shards), self._shards)
        if report.model not in self._models and len(self._models) < MOST_MODELS:
            self._models[report.model] = {}
            canonical(_log, "model", name=report.model, models=len(self._models))
        of_model = self._models.get(report.model, {})
        placement = of_model.get(shard.number)
        if placement is None and report.model in self._models:
            placement = of_model[shard.number] = self._make(report.model, shard)
            self._watching.append(self._tasks.create_task(placement.watch()))
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
        if asked.shards != self._shards:
            self._divide(asked.shards)
        else:
            self._divided_s = monotonic_s()
        of_model = self._models.get(name, {})
        placement = of_model.get(asked.shard)
        if placement is None or asked.shards != self._shards:
            return Placements(worker_ids=(None,) * len(asked.items))
        return await placement.place(asked, [other for other in of_model.values() if other is not placement])

    def _divide(self, shards: int) -> None:
        """Begin anew with so many shards, unless schedulers contradict each other."""
        now_s = monotonic_s()
        is_disputed = shards < self._shards and now_s - self._divided_s < _DIVIDED_S
        if is_disputed or shards > MOST_SHARDS:
            return
        known = {
            name: placement.fleet.workers[name].report
            for name, placement in self._of_worker.items()
            if name in placement.fleet.workers
        }
        for watching in self._watching:
            watching.cancel()
        self._models, self._of_worker, self._watching = {}, {}, []
        self._shards, self._divided_s = shards, now_s
        canonical(_log, "shards", shards=shards)
        for report in known.values():
            self.on_reported(report)

    async def status(self, _: Empty) -> ServiceStatus:
        """Return the status of the only model, or sums with one row per model and all workers."""
        details = {
            name if self._shards == 1 else f"{name}, shard {shard}": placement.details()
            for name, of_model in self._models.items()
            for shard, placement in of_model.items()
        }
        details = _merged(details or {"": self._make("", WHOLE).details()})
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
