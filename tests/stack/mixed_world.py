"""All that decides, together, on virtual time: batching, placement with its moves, relief, cache and loans.

`Parts` says which of them are there. Pools, cache, tables and the rules of lending are the real ones; a loan
is made and returned at once, since messages about loans, their leases and their losses have a world of their
own (`lending_world`). A placement is the real one, fed by heartbeats and step reports, and beside it a
step takes as long as its tokens do, so that how long a load takes can be compared.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from services.placement.core.fleet import FleetCapacity
from services.placement.core.orders import ORDERS, find_order
from services.placement.core.packer import Packer
from services.placement.policy import LIVE_PACKINGS, POLICIES, create, create_packing
from services.scheduler.core.effects import AskPrediction, Effect, PublishMoved, WantKvAtWorker
from services.scheduler.core.rules import ReliefRules, Rules
from services.scheduler.policy import BUILT_IN, find_policy
from services.worker.core.plans import StepWork
from services.worker.kv.core.borrowed_pool import ExtendedPool, OwnPool, Pool, capacity_of
from services.worker.peers.lending.core.borrowing import Balance, Marks
from services.worker.peers.lending.core.grants import lend
from shared.errors import InvalidRequest
from shared.messages.commands import PlacementItem
from shared.messages.sequence import SequenceRef
from tests.stack.actors import Wanted, WorkerProcess
from tests.stack.world import World

BLOCKS = 24
MARKS = Marks(1, 6)
KEEP = MARKS.middle_blocks
CAP = BLOCKS - KEEP
LEND_S, EPOCH_S = 0.25, 0.5
"""How often loans, and moves, are looked at."""
_WANT_S = 2.0


@dataclass(frozen=True)
class Parts:
    """One combination; as a stack has them when nothing is said, and what is switched off stays away."""

    policy: str = "kvasir"
    placement: str | None = "prefix_aware"
    """None: any worker, and steps that take any time."""
    order: str = "fcfs"
    cached: bool = True
    lends: bool = False
    relief: bool = False


class Loans:
    """What one worker has borrowed: by its logical number, whose it is and what it is called there."""

    def __init__(self, pool: ExtendedPool) -> None:
        self.pool = pool
        self.balance = Balance(MARKS, capacity_of(pool))
        self.places: dict[int, tuple[str, int]] = {}
        self.wanted_until_s = 0.0
        self._next = pool.own_blocks

    def enter(self, creditor: str, blocks: list[int]) -> None:
        numbers = range(self._next, self._next + len(blocks))
        self._next += len(blocks)
        self.places.update(zip(numbers, ((creditor, block) for block in blocks), strict=True))
        self.pool.admit(numbers)


class MixedWorld(World):
    """One gateway, one scheduler, one placement, some workers."""

    def __init__(
        self, seed: int, wanted: list[Wanted], parts: Parts, *, workers: int = 3, **tiers: Any
    ) -> None:
        self.parts, self.count = parts, workers
        self.loans: dict[str, Loans] = {}
        self.fleet = FleetCapacity(order=find_order(parts.order))
        self.packer: Packer | None = None
        name = parts.placement
        if name in LIVE_PACKINGS:
            self.packer = Packer(lambda capacity: create_packing(name, capacity))
        elif name is not None:
            self._chooser = create(name)
        super().__init__(
            seed,
            wanted,
            workers=workers,
            kv_blocks=BLOCKS,
            cached=parts.cached,
            policy=find_policy(parts.policy),
            rules=Rules(relief=ReliefRules(enabled=parts.relief)),
            says={"most_lent_blocks": CAP * parts.lends},
            **tiers,
        )
        self.is_checked = name is None
        self.is_lost = lambda effect: isinstance(effect, AskPrediction)  # nobody predicts
        for worker in self.workers.values():
            self.every(LEND_S, lambda each=worker: self.send(each.name, each, lambda: self._even_out(each)))  # type: ignore[misc]
        self.every(EPOCH_S, self._settle_moves)

    def step_s(self, work: StepWork) -> float:
        if self.parts.placement is None:
            return super().step_s(work)
        return 0.003 + 0.00002 * sum(item.end_token - item.first_token for item in work.items)

    def place(self, items: tuple[PlacementItem, ...], excluded: tuple[str, ...]) -> tuple[str | None, ...]:
        if self.packer is not None:
            return self.packer.place(items, frozenset(excluded), self.fleet, self.now_s)
        if self.parts.placement is None:
            return super().place(items, excluded)
        return self.fleet.place(items, frozenset(excluded), self._chooser, self.now_s)

    def withdraw(self, refs: tuple[SequenceRef, ...]) -> None:
        self.fleet.on_withdrawn(refs)
        if self.packer is not None:
            self.packer.on_withdrawn(refs)

    def feed(self, event: str, *details: Any, **more: Any) -> None:
        if event == "on_worker_reported":
            self.fleet.on_reported(details[0], self.now_s)
        elif event == "on_stepped":
            self.fleet.on_stepped(details[0])
            if self.packer is not None:
                self.packer.on_stepped(details[0])
        super().feed(event, *details, **more)

    def _settle_moves(self) -> None:
        """What placement wants moved."""
        self.fleet.on_tick(self.now_s)
        for order in () if self.packer is None else self.packer.on_epoch(self.fleet, self.now_s):
            with suppress(InvalidRequest):
                self.feed("on_move", order)
                continue
            self.packer.on_failed(order.ref, self.now_s)  # type: ignore[union-attr]

    # --- loans

    @property
    def own_ids(self) -> int:
        """Blocks of a worker have lower ids."""
        return BLOCKS

    @property
    def longest_tokens(self) -> int:
        return (BLOCKS + (self.count - 1) * CAP * self.parts.lends) * 16

    def pool_over(self, worker: WorkerProcess, own: OwnPool) -> Pool:
        pool = ExtendedPool(own, self.own_ids)
        self.loans[worker.name] = Loans(pool)
        return pool

    def _carry_out_plan(self, effect: Effect) -> None:
        if isinstance(effect, WantKvAtWorker):
            loans = self.loans[effect.worker_id]
            loans.balance.needed_blocks = -(-effect.tokens // 16) + 1 if effect.tokens else 0
            loans.balance.may_borrow_ahead = effect.may_borrow_ahead
            loans.wanted_until_s = self.now_s + _WANT_S
            return
        super()._carry_out_plan(effect)
        if isinstance(effect, PublishMoved) and self.packer is not None:
            self.packer.on_moved(effect.moved, self.now_s)

    def _even_out(self, worker: WorkerProcess) -> None:
        """Between two steps: borrows, returns, or brings home."""
        loans = self.loans[worker.name]
        pool, balance = loans.pool, loans.balance
        if self.now_s > loans.wanted_until_s:
            balance.needed_blocks, balance.may_borrow_ahead = 0, True
        balance.on_report(capacity_of(pool))
        missing = balance.lacks(pool.borrowed_blocks, 0) if self.parts.lends else 0
        for other in self.loans:
            if missing and other != worker.name and self.workers[other].alive:
                own = self.loans[other].pool.own
                given = lend(own, min(missing, CAP - own.base.withdrawn_blocks), 1, KEEP)
                loans.enter(other, given)
                missing -= len(given)
        back = balance.spares(pool.borrowed_blocks, 0, self._wanted_back(loans))
        if not balance.may_shrink():
            return
        is_spacious = balance.own_blocks > balance.keep_blocks
        home = self._bring_home(loans, balance.own_blocks - balance.keep_blocks) if is_spacious else 0
        if back:
            self._give_back(loans, pool.retire(back, cached=not home))
            balance.on_shrunk()

    def _wanted_back(self, loans: Loans) -> int:
        """By creditors that are short."""
        owed = {name for name, _ in loans.places.values()}
        return sum(self.loans[name].balance.short_blocks for name in owed)

    def _bring_home(self, loans: Loans, most_blocks: int) -> int:
        pool = loans.pool
        most_blocks = min(most_blocks, pool.own.base.lendable_blocks)
        chosen = pool.set_apart(pool.are_used(loans.places), most_blocks)
        home = pool.own.withdraw(pool.own.allocate(len(chosen)))
        for number, place in zip(chosen, home, strict=True):
            self.brought_home(pool, loans.places[number], place)
        pool.own.readmit(pool.come_home(zip(chosen, home, strict=True)))
        self._give_back(loans, chosen)
        return len(chosen)

    def brought_home(self, pool: ExtendedPool, at_creditor: tuple[str, int], place: int) -> None:
        """A borrowed block's content is in the own memory; here nobody keeps account of that."""

    def _give_back(self, loans: Loans, numbers: list[int]) -> None:
        """Those whose creditor has died meanwhile are passed over, as `Debts.release` does."""
        for number in numbers:
            if number in loans.places:
                creditor, block = loans.places.pop(number)
                self.loans[creditor].pool.own.readmit([block])

    def missing_blocks(self, name: str) -> int:
        """Neither free, nor evictable, nor a sequence's."""
        report = self.workers[name].core.report(self.now_s)
        held_blocks = sum(listed.allocated_blocks for listed in report.sequences)
        capacity = report.capacity
        return int(capacity.total_blocks - capacity.plannable_blocks - held_blocks)

    def state(self) -> dict[str, Any]:
        """Who waits, and what there is: for the message of a test that fails."""
        waiting = {key: len(stream.tokens) for key, stream in self.streams.items() if stream.is_open}
        return {"waiting": waiting, **{name: capacity_of(loans.pool) for name, loans in self.loans.items()}}


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
