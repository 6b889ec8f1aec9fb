"""Placement for one model: answers `PlaceSequences` from worker heartbeats and prefix-cache events.

All state is soft. After a restart, one round of heartbeats and one prefix query per worker rebuild it. Under
a packing policy (`mell`), `relocation` also moves sequences.
"""

import asyncio

from services.placement.config import PlacementConfig
from services.placement.core.fleet import FleetCapacity
from services.placement.core.order import find_order
from services.placement.core.roles import FleetRoles, read_roles
from services.placement.policy.contract import PlacementPolicy
from services.placement.relocation import Relocation
from services.placement.role_keeping import RoleKeeping
from shared import subjects
from shared.bus import Bus, fenced, status_of
from shared.clock import Clock, monotonic_s
from shared.errors import InvalidMessage, KvasirError
from shared.liveness import AwakeClock
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import PlacementItem, Placements, PlaceSequences
from shared.messages.plans import WorkerStepped
from shared.messages.prefixes import FindPrefixes, WorkerPrefixes
from shared.messages.reports import ServiceStatus, WorkerReported
from shared.messages.sequence import SequenceRef
from shared.plugins import PluginFaults

_TICK_S = 0.5
_ANSWER_DEADLINE_S = 1.0

_log = get_logger("placement")


class Placement:
    """Message handlers of one model: feed heartbeats to the fleet and let the policy answer each request."""

    def __init__(
        self,
        bus: Bus,
        config: PlacementConfig,
        policy: PlacementPolicy | None,
        clock: Clock = monotonic_s,
        model: str = "",
    ) -> None:
        """Serve the workers of `model`. Without `policy`, `config.policy` names a packing policy."""
        self._bus = bus
        self._policy = policy
        self._policy_name = config.policy
        self._order_name = config.order
        self.fleet = FleetCapacity(
            silence_s=config.worker_timeout_s,
            reservation_s=config.reservation_s,
            order=find_order(config.order),
            roles=FleetRoles(read_roles(config.roles)),
        )
        self._clock = AwakeClock(clock, lambda: bus.connected)
        self.relocation = Relocation(bus, config, self.fleet, self._clock, model) if policy is None else None
        has_roles = self.fleet.roles.is_on
        self.keeping = RoleKeeping(bus, self.fleet, self._clock, model) if has_roles else None
        self._started_s = monotonic_s()
        self._faults = PluginFaults()
        self._placed = 0
        self._waits = 0
        self._questions = 0
        self._missed = asyncio.Event()

    def on_reported(self, report: WorkerReported) -> None:
        self.fleet.on_reported(report, self._clock())

    def on_stepped(self, stepped: WorkerStepped) -> None:
        self.fleet.on_stepped(stepped)
        if self.relocation is not None:
            self.relocation.packer.on_stepped(stepped)

    def on_gone(self, worker_id: str, incarnation: int) -> None:
        """Drop a worker that left the bus."""
        if self.fleet.on_gone(worker_id, incarnation):
            canonical(_log, "worker dropped", worker=worker_id)

    def on_cached(self, news: WorkerPrefixes) -> None:
        self.fleet.prefixes.on_news(news)
        self._missed.set()

    async def place(self, asked: PlaceSequences) -> Placements:
        """Return one worker id per item; None means wait. Raises PolicyFailed if the policy raises."""
        excluded = frozenset(asked.excluded_workers)
        self.fleet.on_withdrawn(asked.withdrawn)
        if self.relocation is not None:
            self.relocation.packer.on_withdrawn(asked.withdrawn)
        if self.keeping is not None:
            self.keeping.on_asked(asked)
        if self._policy is None:
            assert self.relocation is not None
            worker_ids = self.relocation.packer.place(asked.items, excluded, self.fleet, self._clock())
        else:
            try:
                worker_ids = self.fleet.place(
                    asked.items,
                    excluded,
                    self._policy,
                    self._clock(),
                    asked.ahead,
                    are_placed=asked.are_placed,
                )
            except Exception as error:  # a plug-in policy may raise anything
                name = f"placement policy {self._policy_name}"
                raise self._faults.note(name, "choose", error, monotonic_s()) from error
        waits = sum(worker_id is None for worker_id in worker_ids)
        self._placed += len(worker_ids) - waits
        self._waits += waits
        return Placements(worker_ids=worker_ids, expected_tokens=self._note_choices(asked.items))

    def _note_choices(self, items: tuple[PlacementItem, ...]) -> tuple[int, ...]:
        """Log each routed item and return the expected cached tokens per item, 0 if it waits."""
        expected: dict[SequenceRef, int] = {}
        for choice in self.fleet.take_choices():
            expected[choice.item.ref] = choice.expected_tokens
            canonical(
                _log,
                "route",
                ref=str(choice.item.ref),
                worker=choice.worker_id,
                prompt_tokens=choice.item.size_tokens,
                expected_tokens=choice.expected_tokens,
                costs_s={name: round(cost_s, 4) for name, cost_s in choice.costs_s} or None,
            )
        return tuple(expected.get(item.ref, 0) for item in items)

    async def watch(self) -> None:
        """Drop silent workers and query workers with a gap in their prefix events, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._catch_up())
            if self.relocation is not None:
                tasks.create_task(self.relocation.run())
            if self.keeping is not None:
                tasks.create_task(self.keeping.run())

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

    async def status(self, _: Empty) -> ServiceStatus:
        """Return what `python -m services status` shows."""
        workers = sorted(self.fleet.workers.values(), key=lambda worker: worker.worker_id)
        return status_of(
            self._bus,
            "placement",
            monotonic_s() - self._started_s,
            {
                "policy": self._policy_name,
                "trouble": self._faults.text(monotonic_s()),
                "order": self._order_name,
                "placed": self._placed,
                "waits": self._waits,
                "prefix_questions": self._questions,
                **({} if self.relocation is None else self.relocation.details()),
                **({} if self.keeping is None else self.keeping.details()),
                "workers": [
                    {
                        "worker": worker.worker_id,
                        "total_tokens": worker.total_blocks * worker.block_tokens,
                        "free_tokens": worker.free_blocks * worker.block_tokens,
                        "sequences": len(worker.residents),
                        "reserved": len(worker.reservations),
                        "cached_blocks": self.fleet.prefixes.blocks(worker.worker_id),
                        **self._state_of(worker.worker_id),
                    }
                    for worker in workers
                ],
            },
        )

    def _state_of(self, worker_id: str) -> dict[str, str]:
        if self.keeping is not None:
            return {"role": str(self.fleet.roles.role_of(worker_id))}
        return {} if self.relocation is None else {"state": self.relocation.packer.state_of(worker_id)}
