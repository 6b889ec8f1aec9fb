"""The lending world with DGFM: blocks have contents, cycles are settled while messages are late or lost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np

from services.ledger.core.debt_ledger import DebtLedger
from services.ledger.core.dgfm.coordinator import Coordinator, SettlementAsk, SettleRules
from services.worker.peers.lending.core.settling import Copy, Settling, Swap
from shared.messages.lending import KvTier, Settled
from tests.stack.lending_world import BLOCKS, LendingWorld, Member

BOUNCE = 2


@dataclass
class Life:
    """What settling adds to one life of a worker."""

    settling: Settling
    memory: dict[tuple[KvTier, int], int] = field(default_factory=dict)
    """Own block, by tier → what is written there."""
    expected: dict[int, int] = field(default_factory=dict)
    """Logical block in use, own ones that came home included → what its sequence wrote."""


class SettlingWorld(LendingWorld):
    """`settle` looks for cycles in what the ledger knows."""

    def __init__(self, workers: int, host_blocks: int = 0) -> None:
        super().__init__(workers, host_blocks)
        self.coordinator = Coordinator("l", SettleRules(threshold_tokens=16, interval_s=0.0))
        self._lives: dict[tuple[str, int], Life] = {}
        self._values = count(1)
        self._unanswered: dict[str, list[Callable[[Settled | None], None]]] = {}
        """Worker → what it was asked and has not answered yet."""
        self.recalled = 0

    def life(self, member: Member) -> Life:
        at = (member.worker_id, member.incarnation)
        if at not in self._lives:
            life = self._lives[at] = Life(Settling(member.debts, member.grants))

            def on_lost(logical: list[int]) -> None:
                life.settling.on_lost(logical)
                for number in logical:
                    life.expected.pop(number, None)

            member.on_lost = on_lost
            self._fill_bounce(member)
        return self._lives[at]

    # --- what a test does

    def settle(self) -> None:
        self.settle_by(self.coordinator, self.ledger)

    def settle_by(self, coordinator: Coordinator, table: DebtLedger) -> None:
        """A ledger starts what can be settled by what it knows."""
        sizes = dict.fromkeys(self.names, 16)
        self._send(coordinator, coordinator.on_tick(table.debts(), sizes, self.now_s))

    def finish_home(self, name: str, blocks: int) -> None:
        """Sequences end whose blocks came home."""
        member = self.members[name]
        life = self.life(member)
        done = [number for number in life.expected if number < BLOCKS][:blocks]
        for number in done:
            del life.expected[number]
            member.kept.remove(number)
        member.pool.release(done)

    def stop_using(self, name: str, blocks: int) -> None:
        member = self.members[name]
        for number in member.used[:blocks]:
            del self.life(member).expected[number]
        super().stop_using(name, blocks)

    def kill(self, name: str) -> None:
        """Who waits for its answer hears nothing, which is a deadline there."""
        super().kill(name)
        for reply in self._unanswered.pop(name, []):
            reply(None)

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        for member in self.members.values():
            life = self.life(member)
            life.settling.tick(self.now_s)
            self._fill_bounce(member)

    def on_used(self, member: Member, taken: list[int]) -> None:
        life = self.life(member)
        for number in taken:
            life.expected[number] = value = next(self._values)
            place = member.debts.blocks[number]
            creditor = self.members[place.grant.creditor_id]
            if creditor.incarnation == place.grant.creditor_incarnation:
                self.life(creditor).memory[place.tier, place.physical] = value

    # --- how it is connected

    def _fill_bounce(self, member: Member) -> None:
        life = self._lives[member.worker_id, member.incarnation]
        missing = min(BOUNCE - len(life.settling.bounce), member.pool.free_blocks)
        if missing > 0:
            taken = member.pool.allocate(missing)
            life.settling.bounce += taken
            member.kept += taken

    def is_alive(self, coordinator: Coordinator) -> bool:
        """Whether it hears what it is answered."""
        return coordinator is self.coordinator

    def _send(self, coordinator: Coordinator, asks: list[SettlementAsk]) -> None:
        for ask in asks:
            self._post(partial(self._serve, coordinator, ask), partial(self._hear, coordinator, ask, None))

    def _hear(self, coordinator: Coordinator, ask: SettlementAsk, answer: Settled | None) -> None:
        if self.is_alive(coordinator):
            self._send(coordinator, coordinator.on_answer(ask.message, ask.worker_id, answer))

    def _reply(self, coordinator: Coordinator, ask: SettlementAsk, answer: Settled | None) -> None:
        hear = partial(self._hear, coordinator, ask)
        self._post(lambda: hear(answer), lambda: hear(None))

    def _serve(self, coordinator: Coordinator, ask: SettlementAsk) -> None:
        member = self.members[ask.worker_id]
        life = self.life(member)
        outcome = life.settling.on_settle(ask.message, self.now_s)
        if isinstance(outcome, Settled):
            self._reply(coordinator, ask, outcome)
        elif isinstance(outcome, Copy):
            copied = [self._copy(member, number, own) for number, own in outcome.pairs]
            answer = life.settling.on_copied(ask.message, whole=all(copied))
            self._reply(coordinator, ask, answer)
        else:
            self._swap(member, life, outcome)
            self._return_all(member, outcome, partial(self._reply, coordinator, ask))

    def _copy(self, member: Member, number: int, own: int) -> bool:
        place = member.debts.blocks[number]
        key, start = place.grant, (member.worker_id, member.incarnation)
        creditor = self.members[key.creditor_id]
        generation = member.debts.grants[key].generation
        if creditor.incarnation != key.creditor_incarnation:
            return False
        if creditor.grants.enter(start, key.grant_id, generation, self.now_s) is None:
            return False
        assert creditor.grants.grants_of(place.tier, np.array([place.physical]), [key.grant_id]) is not None
        assert place.tier is KvTier.DEVICE, "debts of host memory are not settled"
        self.life(member).memory[KvTier.DEVICE, own] = self.life(creditor).memory[place.tier, place.physical]
        creditor.grants.leave(key.grant_id)
        return True

    def _swap(self, member: Member, life: Life, swap: Swap) -> None:
        for number, own in swap.pairs:
            life.expected[own] = life.expected.pop(number)
            member.used.remove(number)
            self.recalled += 1

    def _return_all(self, member: Member, swap: Swap, reply: Callable[[Settled | None], None]) -> None:
        open_ = [len(swap.repayments)]
        self._unanswered.setdefault(member.worker_id, []).append(reply)

        def on_done(ok: bool) -> None:
            open_[0] -= 1
            self._fill_bounce(member)
            if open_[0] == 0:
                self._unanswered[member.worker_id].remove(reply)
                reply(swap.answer if ok else None)

        for repayment in swap.repayments:
            self._repay(member, repayment, on_done)

    # --- what must hold

    def check(self) -> None:
        """As before, and nobody reads anything but what its sequence wrote."""
        super().check()
        self.coordinator.check_integrity()
        for member in self.members.values():
            life = self.life(member)
            life.settling.check_integrity()
            for number, value in life.expected.items():
                if number < BLOCKS:
                    assert life.memory[KvTier.DEVICE, number] == value, "a block came home as another"
                elif number in member.used:
                    place = member.debts.blocks[number]
                    creditor = self.members[place.grant.creditor_id]
                    if creditor.incarnation == place.grant.creditor_incarnation:
                        assert self.life(creditor).memory[place.tier, place.physical] == value

    def remote_blocks(self) -> int:
        """In use on another worker."""
        return sum(len(member.used) for member in self.members.values())


def ring(world: SettlingWorld, blocks: list[int]) -> None:
    """Each worker in turn is the only one with memory left, and the one after it borrows."""
    count = len(blocks)
    for at, wanted in enumerate(blocks):
        creditor, debtor = world.names[at], world.names[(at + 1) % count]
        taken = {}
        for name in world.names:
            if name != creditor:
                taken[name] = world.members[name].pool.free_blocks
                world.compute(name, taken[name])
        for name in world.names:
            world.beat(name)
        world.deliver_all()
        world.borrow(debtor, wanted)
        for name, blocks_taken in taken.items():
            world.compute(name, -blocks_taken)
    world.advance(0.1)
    for name in world.names:
        world.beat(name)
    world.deliver_all()


def balances(world: LendingWorld) -> dict[str, int]:
    """Lent less borrowed."""
    return {n: m.grants.lent_blocks() - m.debts.borrowed_blocks for n, m in world.members.items()}
