"""Applies roles: re-evaluates them every second, publishes them, and orders hand-overs from the scheduler.

`core/roles.py` and `core/hand_overs.py` decide. Each decision is logged and recorded with the estimated
seconds of every alternative. A refused order is repeated later.
"""

import asyncio
from typing import Any

from services.placement.config import PlacementConfig
from services.placement.core.hand_overs import HandOvers, Wanted, load_of
from services.placement.core.roles import FleetRoles, RoleChoice, read_roles
from services.placement.core.seats import SeatChoice
from services.placement.placing import Placement
from services.placement.policy.contract import CostedPolicy, PlacementPolicy
from shared import subjects
from shared.bus import Bus
from shared.errors import KvasirError
from shared.log import canonical, detail, get_logger
from shared.messages.commands import PlacementItem, PlaceSequences
from shared.messages.moves import MoveMode, SequenceMove, SequenceMoved, WorkerRoles
from shared.messages.plans import WorkerStepped
from shared.messages.reports import WorkerReported

_LOOK_S = 1.0
_ORDER_S = 0.05
_TELL_S = 0.5
_STEP_TOKENS = 512
"""Prompt tokens per step, if the scheduler reports none."""
_SHOWN_COSTS = 8
_log = get_logger("placement.roles")


class RolePlacement(Placement):
    """Placement whose workers have roles: prompts go to those that may compute them, answers move on."""

    def __init__(self, bus: Bus, config: PlacementConfig, policy: PlacementPolicy, **options: Any) -> None:
        super().__init__(bus, config, policy, **options)
        self._roles = FleetRoles(read_roles(config.roles))
        self._hand_overs = HandOvers(self.fleet, self._roles)
        self._waiting_tokens = 0
        self._step_tokens = _STEP_TOKENS
        self._shortage = ""
        self._handed_over = self._failed = 0

    def on_reported(self, report: WorkerReported) -> None:
        super().on_reported(report)
        self._roles.on_workers(self.fleet.workers)

    def on_stepped(self, stepped: WorkerStepped) -> None:
        super().on_stepped(stepped)
        for end in stepped.ended:
            self._roles.on_ended(end.ref.key, end.generated_tokens)

    def on_moved(self, moved: SequenceMoved) -> None:
        self._hand_overs.on_over(moved.ref, bool(moved.reason), self._clock())
        self._handed_over += not moved.reason
        self._failed += bool(moved.reason)

    def offer(self, item: PlacementItem, now_s: float) -> SeatChoice | None:
        if not isinstance(self._policy, CostedPolicy):
            return None
        excluded = self._excluded | self._roles.without_prompts()
        return self.fleet.offer(item, excluded, self._policy, now_s)

    def _choose(self, asked: PlaceSequences, excluded: frozenset[str]) -> tuple[str | None, ...]:
        """Place prompts on workers that may compute them; items placed already stay where they are."""
        self._step_tokens = asked.step_tokens or self._step_tokens
        if asked.are_placed:
            return super()._choose(asked, excluded)
        self._waiting_tokens = asked.waiting_tokens
        self._roles.on_workers(self.fleet.workers)
        worker_ids = super()._choose(asked, excluded | self._roles.without_prompts())
        for choice in self.fleet.choices:
            item = choice.item
            self._roles.on_placed(item.ref.key, item.size_tokens, choice.expected_tokens, self._clock())
        return worker_ids

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().watch())
            tasks.create_task(self._every(_LOOK_S, "look at roles", self._look))
            tasks.create_task(self._every(_TELL_S, "roles told", self._publish))
            tasks.create_task(self._every(_ORDER_S, "hand-overs", self._order_next))

    async def _look(self) -> None:
        now_s = self._clock()
        loads = [load_of(worker, now_s) for worker in self.fleet.workers.values()]
        choice = self._roles.on_epoch(loads, self._waiting_tokens, self._step_tokens, now_s)
        if choice is not None:
            self._note_choice(choice)
            await self._publish()

    async def _publish(self) -> None:
        if not (self._bus.connected and self.fleet.workers):
            return
        self._roles.on_workers(self.fleet.workers)
        shortage = self._roles.shortage()
        if shortage != self._shortage:
            self._shortage = shortage
            canonical(_log, "shortage", model=self._model, reason=shortage or "over")
            self._bus.recorder.note("role shortage", reason=shortage)
        roles = {name: str(self._roles.role_of(name)) for name in self.fleet.workers}
        try:
            shard = self._shard.number
            event = WorkerRoles(model=self._model, roles=roles, shard=shard, shortage=shortage)
            await self._bus.publish(subjects.PLACEMENT_ROLES, event)
        except KvasirError as error:
            _log.warning("roles were not told: %s", error)

    async def _order_next(self) -> None:
        if not self._bus.connected:
            return
        orders = []
        for one in self._hand_overs.next(self._clock()):
            self._note_hand_over(one)
            if one.choice.worker_id is not None:
                target, why = one.choice.worker_id, "its prompt is done: a hand-over"
                orders.append(SequenceMove(ref=one.ref, target=target, mode=MoveMode.KV, why=why))
        if orders:
            for order, _ in await self._order(tuple(orders)):
                self._hand_overs.on_over(order.ref, True, self._clock())

    def _note_choice(self, choice: RoleChoice) -> None:
        costs_s = {name: round(cost_s, 4) for name, cost_s in choice.costs_s.items()}
        roles = {name: str(role) for name, role in choice.roles.items()}
        canonical(_log, "roles", before=choice.before, chosen=choice.chosen, costs_s=costs_s, roles=roles)
        self._bus.recorder.note("roles", before=choice.before, chosen=choice.chosen, costs_s=costs_s)

    def _note_hand_over(self, one: Wanted) -> None:
        fields: dict[str, Any] = {
            "source": one.source,
            "target": one.choice.worker_id or "stays",
            "tokens": one.tokens,
            "stays_s": round(one.choice.stays_s, 4),
            "costs_s": {name: round(cost_s, 4) for name, cost_s in one.choice.costs_s[:_SHOWN_COSTS]},
        }
        detail(_log, "hand-over", ref=str(one.ref), **fields)
        ref = {"choice": one.ref.choice, "attempt": one.ref.attempt}
        self._bus.recorder.note("hand-over", one.ref.request_id, **ref, **fields)

    def details(self) -> dict[str, Any]:
        found = super().details()
        for row in found["workers"]:
            row["role"] = str(self._roles.role_of(row["worker"]))
        return found | {
            "role_changes": self._roles.changes,
            "hand_overs": self._handed_over,
            "hand_overs_failed": self._failed,
            "hand_overs_under_way": len(self._hand_overs),
            "roles_s": {name: round(each.request_s, 3) for name, each in self._roles.seconds.items()},
        }
