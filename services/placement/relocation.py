"""Carries out a packing policy: orders its moves, applies their outcomes, and parks spare workers.

`packer` and `scaling` decide. An order that gets no reply counts as refused and is repeated later.
"""

import asyncio
from dataclasses import replace
from typing import Any

from services.placement.config import PlacementConfig
from services.placement.core.fleet import FleetCapacity
from services.placement.core.move_mode import MoveModes, WantedMove
from services.placement.core.packer import Packer
from services.placement.core.scaling import Scaling
from services.placement.policy import create_packing
from services.placement.policy.contract import PackingPolicy
from services.placement.policy.mell import Mell
from services.placement.policy.mell.settings import EAGER, MellSettings
from shared import subjects
from shared.bus import Bus, Handler, Listener, fenced
from shared.clock import Clock
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, SequenceMoved, WorkersWanted

HANDLERS: tuple[Handler, ...] = (Listener(subjects.SCHEDULER_MOVED, SequenceMoved, "on_moved"),)
_ANSWER_DEADLINE_S = 1.0
_MOST_ORDERS = 64
"""Maximum number of orders in one message."""
_log = get_logger("placement.relocation")


class Relocation:
    """Epoch loop of a packing policy; exists only while the configured policy is one."""

    def __init__(
        self, bus: Bus, config: PlacementConfig, fleet: FleetCapacity, clock: Clock, model: str = ""
    ) -> None:
        """Serve the workers of `model`."""
        self._bus = bus
        self._config = config
        self._fleet = fleet
        self._clock = clock
        self._model = model
        self.packer = Packer(lambda capacity_blocks: _create(config, capacity_blocks), config.packing())
        self.scaling = Scaling(config.scaling())
        self.modes = MoveModes(config.move_mode, config.epoch_s)

    def on_moved(self, moved: SequenceMoved) -> None:
        self.modes.on_over(moved.ref)
        self.packer.on_moved(moved, self._clock())

    async def run(self) -> None:
        """Run one epoch every `epoch_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self._config.epoch_s)
            if self._bus.connected:
                with fenced("packing epoch"):
                    await self._epoch()

    async def _epoch(self) -> None:
        orders = self._divided(self.packer.on_epoch(self._fleet, self._clock()))
        for first in range(0, len(orders), _MOST_ORDERS):
            await self._order(orders[first : first + _MOST_ORDERS])
        if self._config.scale:
            await self._scale()

    def _divided(self, wanted: tuple[SequenceMove, ...]) -> tuple[SequenceMove, ...]:
        """Return this epoch's moves, each by KV or by tokens. The policy requests the others again."""
        homes = {
            (key, resident.attempt): (worker.worker_id, resident.tokens)
            for worker in self._fleet.workers.values()
            for key, resident in worker.residents.items()
        }
        wanted_moves = [
            WantedMove(order, *homes[order.ref.key, order.ref.attempt])
            for order in wanted
            if (order.ref.key, order.ref.attempt) in homes
        ]
        costs = {name: worker.move_costs for name, worker in self._fleet.workers.items()}
        now, _ = self.modes.divide(wanted_moves, costs, self._clock())
        begun = {order.ref for order in now}
        for order in wanted:
            if order.ref not in begun:
                self.packer.on_postponed(order)
        return tuple(now)

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
            if refusal:
                _log.info("%s is not moved to %s: %s", order.ref, order.target, refusal)
                self.modes.on_over(order.ref)
                self.packer.on_refused(order, self._clock())

    async def _scale(self) -> None:
        now_s = self._clock()
        parked, unparked = self.scaling.on_epoch(
            self._fleet.workers, self.packer.idle_workers(self._fleet), self.packer.wanting(now_s), now_s
        )
        for worker_id in parked:
            self.packer.retire(worker_id, self._fleet)
            canonical(_log, "worker parked", worker=worker_id, wanted=self.scaling.wanted)
        for worker_id in unparked:
            self.packer.unretire(worker_id)
            canonical(_log, "worker taken back", worker=worker_id, wanted=self.scaling.wanted)
        event = WorkersWanted(
            wanted=self.scaling.wanted, parked=tuple(sorted(self.scaling.parked)), model=self._model
        )
        try:
            await self._bus.publish(subjects.PLACEMENT_WANTED, event)
        except KvasirError as error:
            _log.warning("how many workers are wanted was not sent: %s", error)

    def details(self) -> dict[str, Any]:
        """Return the fields for `status`."""
        counts = self.packer.counts
        return {
            "packed_blocks": self.packer.capacity_blocks,
            "moves_ordered": counts.ordered,
            "moved": counts.moved,
            "moves_failed": counts.failed,
            **{f"moves_{mode}": count for mode, count in self.modes.counts.items()},
            "strays": counts.strays,
            "wanted_workers": self.scaling.wanted if self._config.scale else "not scaled",
            "parked": ", ".join(sorted(self.scaling.parked)),
        }


def _create(config: PlacementConfig, capacity_blocks: int) -> PackingPolicy:
    if config.policy == "load_balance":
        return create_packing(config.policy, capacity_blocks)
    base = EAGER if config.policy == "mell_eager" else MellSettings()
    settings = replace(
        base,
        free_weight=config.free_weight,
        requests_weight=config.requests_weight,
        distance_weight=config.distance_weight,
    )
    return Mell(capacity_blocks, settings)
