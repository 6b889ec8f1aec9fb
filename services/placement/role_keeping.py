"""Applies roles: re-evaluates them every second, publishes them, and orders hand-overs from the scheduler.

`core/roles.py` and `core/hand_overs.py` decide. Each decision is logged and recorded with the estimated
seconds of every alternative. An order that gets no reply counts as refused and is repeated later.
"""

import asyncio
from typing import Any

from services.placement.core.fleet import FleetCapacity
from services.placement.core.hand_overs import HandOvers, Wanted, load_of
from services.placement.core.roles import FleetRoles, RoleChoice
from shared import subjects
from shared.bus import Bus, fenced
from shared.clock import Clock
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.commands import PlaceSequences
from shared.messages.moves import (
    MoveMode,
    MoveSequences,
    MovesTaken,
    SequenceMove,
    SequenceMoved,
    WorkerRoles,
)

_LOOK_S = 1.0
_ORDER_S = 0.05
_TELL_S = 0.5
_ANSWER_DEADLINE_S = 1.0
_STEP_TOKENS = 512
"""Prompt tokens per step, if the scheduler reports none."""
_log = get_logger("placement.roles")


class RoleKeeping:
    """Role and hand-over loops for the workers of one model."""

    def __init__(self, bus: Bus, fleet: FleetCapacity, clock: Clock, model: str) -> None:
        self._bus = bus
        self._fleet = fleet
        self._roles: FleetRoles = fleet.roles
        self._clock = clock
        self._model = model
        self._hand_overs = HandOvers(fleet, fleet.roles)
        self._waiting_tokens = 0
        self._step_tokens = _STEP_TOKENS
        self._shortage = ""
        self.ordered = self.handed_over = self.failed = 0

    def on_asked(self, asked: PlaceSequences) -> None:
        """Record the step size and the waiting prompt tokens that the scheduler sends with its request."""
        self._step_tokens = asked.step_tokens or self._step_tokens
        if not asked.are_placed:
            self._waiting_tokens = asked.waiting_tokens

    def on_moved(self, moved: SequenceMoved) -> None:
        self._hand_overs.on_over(moved.ref, bool(moved.reason), self._clock())
        self.handed_over += not moved.reason
        self.failed += bool(moved.reason)

    async def run(self) -> None:
        """Run the three loops until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look())
            tasks.create_task(self._tell())
            tasks.create_task(self._hand_over())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            with fenced("look at roles"):
                now_s = self._clock()
                loads = [load_of(worker, now_s) for worker in self._fleet.workers.values()]
                choice = self._roles.on_epoch(loads, self._waiting_tokens, self._step_tokens, now_s)
                if choice is not None:
                    self._note_choice(choice)
                    await self._publish()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            with fenced("roles told"):
                await self._publish()

    async def _publish(self) -> None:
        if not (self._bus.connected and self._fleet.workers):
            return
        shortage = self._roles.shortage()
        if shortage != self._shortage:
            self._shortage = shortage
            canonical(_log, "shortage", model=self._model, reason=shortage or "over")
            self._bus.recorder.note("role shortage", reason=shortage)
        roles = {name: str(self._roles.role_of(name)) for name in self._fleet.workers}
        try:
            event = WorkerRoles(model=self._model, roles=roles, shortage=shortage)
            await self._bus.publish(subjects.PLACEMENT_ROLES, event)
        except KvasirError as error:
            _log.warning("roles were not told: %s", error)

    async def _hand_over(self) -> None:
        while True:
            await asyncio.sleep(_ORDER_S)
            if self._bus.connected:
                with fenced("hand-overs"):
                    await self._order_next()

    async def _order_next(self) -> None:
        wanted = self._hand_overs.next(self._clock())
        for one in wanted:
            self._note_hand_over(one)
        orders = [
            SequenceMove(ref=one.ref, target=one.choice.worker_id, mode=MoveMode.KV)
            for one in wanted
            if one.choice.worker_id is not None
        ]
        if orders:
            await self._order(tuple(orders))

    async def _order(self, orders: tuple[SequenceMove, ...]) -> None:
        try:
            answer = await self._bus.request(
                subjects.SCHEDULER_MOVE,
                MoveSequences(moves=orders),
                MovesTaken,
                deadline_s=_ANSWER_DEADLINE_S,
            )
            refusals = answer.refusals
        except KvasirError as error:
            refusals = (error.message,) * len(orders)
        for order, refusal in zip(orders, refusals, strict=False):
            self.ordered += 1
            if refusal:
                _log.info("%s is not handed over to %s: %s", order.ref, order.target, refusal)
                self._hand_overs.on_over(order.ref, True, self._clock())

    def _note_choice(self, choice: RoleChoice) -> None:
        costs_s = {name: round(cost_s, 4) for name, cost_s in choice.costs_s.items()}
        roles = {name: str(role) for name, role in choice.roles.items()}
        canonical(_log, "roles", before=choice.before, chosen=choice.chosen, costs_s=costs_s, roles=roles)
        self._bus.recorder.note("roles", before=choice.before, chosen=choice.chosen, costs_s=costs_s)

    def _note_hand_over(self, one: Wanted) -> None:
        costs_s = {name: round(cost_s, 4) for name, cost_s in one.choice.costs_s[:_SHOWN_COSTS]}
        fields: dict[str, Any] = {
            "source": one.source,
            "target": one.choice.worker_id or "stays",
            "tokens": one.tokens,
            "stays_s": round(one.choice.stays_s, 4),
            "costs_s": costs_s,
        }
        canonical(_log, "hand-over", ref=str(one.ref), **fields)
        ref = {"choice": one.ref.choice, "attempt": one.ref.attempt}
        self._bus.recorder.note("hand-over", one.ref.request_id, **ref, **fields)

    def details(self) -> dict[str, Any]:
        """Return the fields for `status`."""
        return {
            "role_changes": self._roles.changes,
            "hand_overs": self.handed_over,
            "hand_overs_failed": self.failed,
            "hand_overs_under_way": len(self._hand_overs),
            "roles_s": {name: round(each.request_s, 3) for name, each in self._roles.seconds.items()},
        }


_SHOWN_COSTS = 8
