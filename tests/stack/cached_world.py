"""Workers that cache prefixes and lend and borrow beside it, as the scheduler orders, on virtual time.

Pools, cache, tables and the rules of lending are the real ones; a loan is made and returned at once, since
messages about loans, their leases and their losses have a world of their own (`lending_world`).
"""

from typing import Any

import msgspec

from services.scheduler.core.effects import Effect, WantKvAtWorker
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicyFactory
from services.scheduler.policy.kvasir import KvasirPolicy
from services.worker.kv.core.borrowed_pool import ExtendedPool, OwnPool, Pool, capacity_of
from services.worker.peers.lending.core.lendable_memory import lend
from services.worker.peers.lending.core.watermarks import Balance, Marks
from shared.messages.reports import WorkerReported
from tests.stack.actors import Wanted, WorkerProcess
from tests.stack.world import World

BLOCKS = 24
MARKS = Marks(1, 6)
KEEP = MARKS.middle_blocks
CAP = BLOCKS - KEEP
TICK_S = 0.25
_WANT_S = 2.0


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


class CachedWorld(World):
    """What is switched off stays away: cache, loans."""

    def __init__(
        self,
        seed: int,
        wanted: list[Wanted],
        *,
        workers: int = 2,
        lends: bool = True,
        cached: bool = True,
        policy: PolicyFactory = KvasirPolicy,
        rules: Rules | None = None,
    ) -> None:
        self.lends, self.loans, self.count = lends, dict[str, Loans](), workers
        super().__init__(
            seed,
            wanted,
            workers=workers,
            kv_blocks=BLOCKS,
            loss=0.0,
            cached=cached,
            policy=policy,
            rules=rules,
        )
        for worker in self.workers.values():
            self.every(TICK_S, lambda each=worker: self.send(each.name, each, lambda: self._even_out(each)))  # type: ignore[misc]

    @property
    def longest_tokens(self) -> int:
        return (BLOCKS + (self.count - 1) * CAP * self.lends) * 16

    def pool_over(self, worker: WorkerProcess, own: OwnPool) -> Pool:
        pool = ExtendedPool(own, BLOCKS)
        self.loans[worker.name] = Loans(pool)
        return pool

    def _numbered(self, worker: WorkerProcess, report: WorkerReported) -> WorkerReported:
        capacity = msgspec.structs.replace(report.capacity, most_lent_blocks=CAP * self.lends)
        return msgspec.structs.replace(super()._numbered(worker, report), capacity=capacity)

    def _carry_out_plan(self, effect: Effect) -> None:
        if isinstance(effect, WantKvAtWorker):
            loans = self.loans[effect.worker_id]
            loans.balance.needed_blocks = -(-effect.tokens // 16) + 1 if effect.tokens else 0
            loans.balance.may_borrow_ahead = effect.may_borrow_ahead
            loans.wanted_until_s = self.now_s + _WANT_S
        else:
            super()._carry_out_plan(effect)

    def _even_out(self, worker: WorkerProcess) -> None:
        """Between two steps: borrows, returns, or brings home."""
        loans = self.loans[worker.name]
        pool, balance = loans.pool, loans.balance
        if self.now_s > loans.wanted_until_s:
            balance.needed_blocks, balance.may_borrow_ahead = 0, True
        balance.on_report(capacity_of(pool))
        missing = balance.lacks(pool.borrowed_blocks, 0) if self.lends else 0
        for other in self.loans:
            if missing and other != worker.name:
                given = lend(self.loans[other].pool.own, min(missing, self._lendable(other)), 1, KEEP)
                loans.enter(other, given)
                missing -= len(given)
        back = balance.spares(pool.borrowed_blocks, 0, self._wanted_back(loans))
        if balance.may_shrink() and back:
            self._give_back(loans, pool.retire(back))
            balance.on_shrunk()
        elif balance.may_shrink() and balance.own_blocks > balance.keep_blocks:
            self._bring_home(loans, balance.own_blocks - balance.keep_blocks)

    def _lendable(self, name: str) -> int:
        return CAP - self.loans[name].pool.own.withdrawn_blocks

    def _wanted_back(self, loans: Loans) -> int:
        """By creditors that are short."""
        owed = {name for name, _ in loans.places.values()}
        return sum(self.loans[name].balance.short_blocks for name in owed)

    def _bring_home(self, loans: Loans, most_blocks: int) -> None:
        pool = loans.pool
        chosen = pool.set_apart(pool.are_used(loans.places), most_blocks)
        home = pool.own.allocate(len(chosen))
        pool.own.withdraw(home)
        pool.own.readmit(pool.come_home(zip(chosen, home, strict=True)))
        self._give_back(loans, chosen)

    def _give_back(self, loans: Loans, numbers: list[int]) -> None:
        for number in numbers:
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
