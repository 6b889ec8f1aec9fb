"""Carries out a packing policy: orders its moves, applies their outcomes, and parks spare workers.

`packer` and `scaling` decide. A refused order is repeated later.
"""

import asyncio
from typing import Any

from services.placement.config import PlacementConfig
from services.placement.core.move_mode import MoveModes, WantedMove
from services.placement.core.packer import Packer
from services.placement.core.scaling import Scaling
from services.placement.placing import Placement
from services.placement.policy import create_packing
from shared import subjects
from shared.bus import Bus
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.commands import PlaceSequences
from shared.messages.moves import SequenceMove, SequenceMoved, WorkersWanted
from shared.messages.plans import WorkerStepped
from shared.messages.sequence import SequenceRef

_MOST_ORDERS = 64
"""Maximum number of orders in one message."""
_log = get_logger("placement.relocation")


class PackingPlacement(Placement):
    """Placement with a packing policy, which also moves sequences and stops workers, epoch by epoch."""

    def __init__(self, bus: Bus, config: PlacementConfig, **options: Any) -> None:
        super().__init__(bus, config, None, **options)
        self.packer = Packer(lambda capacity_blocks: create_packing(config.policy, capacity_blocks))
        self._scaling = Scaling(least=config.min_workers, most=config.max_workers, linger_s=config.idle_s)
        self._modes = MoveModes(config.move_mode, config.epoch_s)

    def on_stepped(self, stepped: WorkerStepped) -> None:
        super().on_stepped(stepped)
        self.packer.on_stepped(stepped)

    def on_moved(self, moved: SequenceMoved) -> None:
        self._modes.on_over(moved.ref)
        self.packer.on_moved(moved, self._clock())

    def _choose(self, asked: PlaceSequences, excluded: frozenset[str]) -> tuple[str | None, ...]:
        self.packer.on_withdrawn(asked.withdrawn)
        return self.packer.place(asked.items, excluded, self.fleet, self._clock())

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().watch())
            tasks.create_task(self._every(self._config.epoch_s, "packing epoch", self._epoch))

    async def _epoch(self) -> None:
        if not self._bus.connected:
            return
        orders = self._divided(self.packer.on_epoch(self.fleet, self._clock()))
        for first in range(0, len(orders), _MOST_ORDERS):
            for order, _ in await self._order(orders[first : first + _MOST_ORDERS]):
                self._modes.on_over(order.ref)
                self.packer.on_failed(order.ref, self._clock())
        if self._config.scale and self._shard.count == 1:
            await self._scale()

    def _divided(self, wanted: tuple[SequenceMove, ...]) -> tuple[SequenceMove, ...]:
        """Return this epoch's moves, each by KV or by tokens. The policy requests the others again."""
        moves: dict[SequenceRef, WantedMove] = {}
        for order in wanted:
            for source, worker in self.fleet.workers.items():
                resident = worker.residents.get(order.ref.key)
                if resident is not None and resident.attempt == order.ref.attempt:
                    moves[order.ref] = WantedMove(order, source, resident.tokens)
        reports = {name: worker.report for name, worker in self.fleet.workers.items()}
        now = self._modes.divide(list(moves.values()), reports, self._clock())
        begun = {order.ref for order in now}
        for order in wanted:
            if order.ref not in begun:
                self.packer.on_postponed(order)
        return tuple(now)

    async def _scale(self) -> None:
        now_s, scaling = self._clock(), self._scaling
        parked, unparked = scaling.on_epoch(
            self.fleet.workers, self.packer.idle_workers(self.fleet), self.packer.wanting(now_s), now_s
        )
        for worker_id in parked:
            self.packer.retire(worker_id, self.fleet)
            canonical(_log, "worker parked", worker=worker_id, wanted=scaling.wanted)
        for worker_id in unparked:
            self.packer.unretire(worker_id)
            canonical(_log, "worker taken back", worker=worker_id, wanted=scaling.wanted)
        event = WorkersWanted(wanted=scaling.wanted, parked=tuple(sorted(scaling.parked)), model=self._model)
        try:
            await self._bus.publish(subjects.PLACEMENT_WANTED, event)
        except KvasirError as error:
            _log.warning("how many workers are wanted was not sent: %s", error)

    def details(self) -> dict[str, Any]:
        found, counts = super().details(), self.packer.counts
        for row in found["workers"]:
            row["state"] = self.packer.state_of(row["worker"])
        return found | {
            "packed_blocks": self.packer.capacity_blocks,
            "moves_ordered": counts["ordered"],
            "moved": counts["moved"],
            "moves_failed": counts["failed"],
            **{f"moves_{mode}": count for mode, count in self._modes.counts.items()},
            "strays": counts["strays"],
            "wanted_workers": self._scaling.wanted if self._config.scale else "not scaled",
            "parked": ", ".join(sorted(self._scaling.parked)),
        }
