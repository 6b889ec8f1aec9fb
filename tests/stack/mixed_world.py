"""All that decides, together, on virtual time: batching, placement with its moves, relief, cache and loans.

`Parts` says which of them are there. Placement is the real one, fed by heartbeats and step reports; a step
takes as long as its tokens do, so that how long a load takes can be compared.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from services.placement.core.fleet import FleetCapacity
from services.placement.core.order import ORDERS, find_order
from services.placement.core.packer import Packer
from services.placement.policy import LIVE_PACKINGS, POLICIES, create, create_packing
from services.scheduler.core.effects import Effect, PublishMoved
from services.scheduler.core.rules import ReliefRules, Rules
from services.scheduler.policy import BUILT_IN, find_policy
from services.worker.core.step_work import StepWork
from shared.errors import InvalidRequest
from shared.messages.commands import PlacementItem
from tests.stack.actors import Wanted
from tests.stack.cached_world import CachedWorld

WORKERS = 3
EPOCH_S = 0.5


@dataclass(frozen=True)
class Parts:
    """One combination; as a stack has them when nothing is said."""

    policy: str = "kvasir"
    placement: str = "prefix_aware"
    order: str = "fcfs"
    cached: bool = True
    lends: bool = False
    relief: bool = False


class MixedWorld(CachedWorld):
    """One gateway, one scheduler, one placement, `WORKERS` workers."""

    def __init__(self, seed: int, wanted: list[Wanted], parts: Parts) -> None:
        self.fleet = FleetCapacity(order=find_order(parts.order))
        self.packer: Packer | None = None
        if parts.placement in LIVE_PACKINGS:
            self.packer = Packer(lambda capacity: create_packing(parts.placement, capacity))
        else:
            self._chooser = create(parts.placement)
        super().__init__(
            seed,
            wanted,
            workers=WORKERS,
            lends=parts.lends,
            cached=parts.cached,
            policy=find_policy(parts.policy),
            rules=Rules(relief=ReliefRules(enabled=parts.relief)),
        )
        self.every(EPOCH_S, self._settle_moves)

    def step_s(self, work: StepWork) -> float:
        return 0.003 + 0.00002 * sum(item.end_token - item.first_token for item in work.items)

    def place(self, items: tuple[PlacementItem, ...], excluded: tuple[str, ...]) -> tuple[str | None, ...]:
        if self.packer is not None:
            return self.packer.place(items, frozenset(excluded), self.fleet, self.now_s)
        return self.fleet.place(items, frozenset(excluded), self._chooser, self.now_s)

    def _feed(self, event: str, *details: Any) -> None:
        if event == "on_worker_reported":
            self.fleet.on_reported(details[0], self.now_s)
        elif event == "on_stepped":
            self.fleet.on_stepped(details[0])
            if self.packer is not None:
                self.packer.on_stepped(details[0])
        self._carry_out_plans(getattr(self.core, event)(*details, self.now_s))  # checked at the end only

    def _carry_out_plan(self, effect: Effect) -> None:
        super()._carry_out_plan(effect)
        if isinstance(effect, PublishMoved) and self.packer is not None:
            self.packer.on_moved(effect.moved, self.now_s)

    def _settle_moves(self) -> None:
        """What placement wants moved."""
        self.fleet.on_tick(self.now_s)
        for order in () if self.packer is None else self.packer.on_epoch(self.fleet, self.now_s):
            with suppress(InvalidRequest):
                self._carry_out_plans(self.core.on_move(order, self.now_s))
                continue
            self.packer.on_refused(order, self.now_s)  # type: ignore[union-attr]


Element = tuple[str, Any]


LENDS: Element = ("lends", True)


ELEMENTS: list[Element] = [
    *(("policy", name) for name in sorted(BUILT_IN)),
    *(("placement", name) for name in sorted({*POLICIES, *LIVE_PACKINGS})),
    *(("order", name) for name in sorted(ORDERS)),
    ("cached", False),
    LENDS,
    ("relief", True),
]


OFF_DEFAULT = [one for one in ELEMENTS if getattr(Parts(), one[0]) != one[1]]


PAIRS = [(one, other) for one, other in combinations(OFF_DEFAULT, 2) if one[0] != other[0]]


def name_of(elements: Any) -> str:
    return "+".join(f"{dimension}={value}" for dimension, value in elements)
