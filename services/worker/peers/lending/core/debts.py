"""The debtor's side: borrowed blocks, which of them are in use, and when leases must be renewed. Pure.

Borrowed blocks are numbered after all own ids, each number once: with 4 own ids, blocks 30 and 12 of worker b
become 4 and 5. A lease counts from when the question was *sent*, so this worker gives a block up before its
creditor does. Sends nothing; knows neither sequences nor bytes.
Source: papers/001 §4.3 (the rBlock table), §4.4; `algorithms.md` §4.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from shared.messages.lending import (
    BlocksReturned,
    Grant,
    HeldGrant,
    KvTier,
    LeasesRenewed,
    RenewLeases,
    ReturnBlocks,
)

_RENEWALS_IN_A_LEASE = 4


@dataclass(frozen=True, slots=True)
class GrantKey:
    """Global name of a grant."""

    creditor_id: str
    creditor_incarnation: int
    grant_id: int


class BlockState(StrEnum):
    """State of a borrowed block."""

    FREE = "free"
    USED = "used"
    FROZEN = "frozen"
    """Used, and part of a settlement or recall: neither released nor returned."""
    RETURNING = "returning"
    """No longer used; the creditor has not confirmed it yet."""


@dataclass(slots=True)
class Borrowed:
    """One borrowed block."""

    grant: GrantKey
    tier: KvTier
    physical: int
    """Its number within that tier of the creditor."""
    state: BlockState = BlockState.FREE
    is_orphan: bool = False
    """Frozen, and its sequence has ended: thawing frees it."""


@dataclass(slots=True)
class HeldLoan:
    """One grant, on the debtor's side."""

    tier: KvTier
    generation: int
    """To name with every access."""
    ends_s: float
    renew_s: float
    """When to ask for a renewal next."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Logical numbers of the blocks left, by physical number."""

    def renew(self, sent_s: float, lease_s: float) -> None:
        self.ends_s, self.renew_s = sent_s + lease_s, sent_s + lease_s / _RENEWALS_IN_A_LEASE


@dataclass(frozen=True, slots=True)
class Renewal:
    """A request to renew all grants of one creditor."""

    creditor_id: str
    message: RenewLeases


@dataclass(frozen=True, slots=True)
class Repayment:
    """Blocks of one grant on their way back to their creditor."""

    creditor_id: str
    message: ReturnBlocks

    @property
    def grant(self) -> GrantKey:
        return GrantKey(self.creditor_id, self.message.creditor_incarnation, self.message.grant_id)


class Debts:
    """Blocks that one incarnation of a worker owes to others."""

    def __init__(self, worker_id: str, first_id: int, incarnation: int) -> None:
        """`first_id`: number of the first borrowed block."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._next = first_id
        self.blocks: dict[int, Borrowed] = {}
        """By logical number, those on the way back included."""
        self.grants: dict[GrantKey, HeldLoan] = {}
        self._free: dict[int, None] = {}
        self._wanted_back: dict[str, int] = {}
        """Device blocks that each creditor wants back because it is short."""

    @property
    def free_blocks(self) -> int:
        """Number of borrowed blocks not in use."""
        return len(self._free)

    @property
    def borrowed_blocks(self) -> int:
        """Number of borrowed blocks, those on the way back included."""
        return len(self.blocks)

    def borrowed_from(self, tier: KvTier | None = None) -> dict[str, int]:
        """Return the number of borrowed blocks by creditor, of one tier or both."""
        counts: Counter[str] = Counter()
        for key, loan in self.grants.items():
            if tier in (None, loan.tier):
                counts[key.creditor_id] += len(loan.blocks)
        return dict(counts)

    def in_state(self, state: BlockState) -> list[int]:
        return [number for number, block in self.blocks.items() if block.state is state]

    def used_at(self, creditor_id: str, tier: KvTier) -> list[int]:
        """Return the logical numbers in use, but not frozen, in one tier of one creditor."""
        used = [(number, self.blocks[number]) for number in self.in_state(BlockState.USED)]
        return [number for number, one in used if (one.grant.creditor_id, one.tier) == (creditor_id, tier)]

    def lenders(self) -> list[tuple[str, KvTier]]:
        """Return the creditors and tiers that blocks are borrowed from."""
        return sorted({(key.creditor_id, loan.tier) for key, loan in self.grants.items()})

    def on_granted(self, grant: Grant, sent_s: float) -> list[int]:
        """Enter a grant and return its logical blocks; none for a known grant.

        `sent_s`: when the question was sent."""
        key = GrantKey(grant.creditor_id, grant.creditor_incarnation, grant.grant_id)
        if key in self.grants:
            return []
        loan = self.grants[key] = HeldLoan(grant.tier, grant.generation, 0.0, 0.0)
        loan.renew(sent_s, grant.lease_s)
        for physical in grant.blocks:
            self.blocks[self._next] = Borrowed(key, grant.tier, physical)
            loan.blocks[physical] = self._next
            self._next += 1
        logical = list(loan.blocks.values())
        self._free.update(dict.fromkeys(logical))
        return logical

    def take(self, blocks: int) -> list[int]:
        """Take that many free blocks into use, oldest grants first. Raises ValueError if there are fewer."""
        if not 0 <= blocks <= len(self._free):
            raise ValueError(f"{blocks} borrowed blocks asked for, {len(self._free)} free")
        taken = list(islice(self._free, blocks))
        self.use(taken)
        return taken

    def use(self, logical: Iterable[int]) -> None:
        """Take exactly these blocks into use. Raises KeyError for one that is not free."""
        for number in logical:
            del self._free[number]
            self.blocks[number].state = BlockState.USED

    def release(self, logical: Iterable[int]) -> None:
        """End the use of blocks. Frozen ones become free once they thaw; lost ones are skipped."""
        for number in logical:
            block = self.blocks.get(number)
            if block is None:
                continue
            if block.state is BlockState.FROZEN:
                block.is_orphan = True
            elif block.state is BlockState.USED:
                block.state = BlockState.FREE
                self._free[number] = None
            else:
                raise ValueError(f"borrowed block {number} is {block.state}, not used")

    def freeze(self, logical: Iterable[int]) -> None:
        """Freeze used blocks. Raises ValueError for others."""
        chosen = [self.blocks[number] for number in logical]
        if any(block.state is not BlockState.USED for block in chosen):
            raise ValueError("only blocks in use can be frozen")
        for block in chosen:
            block.state = BlockState.FROZEN

    def thaw(self, logical: Iterable[int]) -> None:
        """End `freeze`. Blocks released meanwhile become free."""
        for number in logical:
            block = self.blocks.get(number)
            if block is not None and block.state is BlockState.FROZEN:
                block.state = BlockState.USED
                if block.is_orphan:
                    block.is_orphan = False
                    self.release([number])

    def give_back(self, blocks: int) -> list[Repayment]:
        """Return up to `blocks` free blocks to their creditors.

        Order: device memory of the creditors that are shortest, host memory, newest grants."""
        short = {name: wanted for name, wanted in self._wanted_back.items() if wanted > 0}
        pressing = sorted(short, key=lambda name: (-short[name], name))

        def rank(number: int) -> tuple[int, bool, int]:
            block = self.blocks[number]
            creditor, is_device = block.grant.creditor_id, block.tier is KvTier.DEVICE
            helps = is_device and creditor in short
            return pressing.index(creditor) if helps else len(pressing), is_device, -number

        return self._return(sorted(self._free, key=rank)[: max(0, blocks)])

    def recalled(self, logical: Iterable[int]) -> list[Repayment]:
        """Return frozen blocks whose KV has been copied home."""
        numbers = [number for number in logical if number in self.blocks]
        for number in numbers:
            self.blocks[number].is_orphan = False
        return self._return(numbers)

    def retries(self) -> list[Repayment]:
        """Return the repayments that no creditor has confirmed."""
        return self._repayments(self.in_state(BlockState.RETURNING))

    def on_returned(self, sent: Repayment, reply: BlocksReturned) -> None:
        """Forget blocks whose return the creditor confirmed."""
        loan = self.grants.get(sent.grant)
        if loan is None:
            return
        named = [loan.blocks[physical] for physical in sent.message.blocks if physical in loan.blocks]
        returning = [number for number in named if self.blocks[number].state is BlockState.RETURNING]
        if loan.tier is KvTier.DEVICE:
            wanted = self._wanted_back.get(sent.creditor_id, 0) - len(returning)
            self._wanted_back[sent.creditor_id] = max(0, wanted)
        loan.generation = max(loan.generation, reply.generation)
        self._remove(sent.grant, returning)

    def renewals(self, now_s: float) -> list[Renewal]:
        """Return the renewals due, one message per creditor incarnation, and schedule their retry."""
        due: dict[tuple[str, int], list[GrantKey]] = {}
        for key, loan in self.grants.items():
            if any(self.blocks[n].state is not BlockState.RETURNING for n in loan.blocks.values()):
                due.setdefault((key.creditor_id, key.creditor_incarnation), []).append(key)
        return [
            self._renewal(keys, now_s)
            for keys in due.values()
            if any(now_s >= self.grants[key].renew_s for key in keys)
        ]

    def on_renewed(self, sent: Renewal, reply: LeasesRenewed, sent_s: float) -> list[int]:
        """Extend leases; return the lost logical blocks, whose grant has ended at the creditor."""
        asked = sent.message
        same_life = reply.creditor_incarnation == asked.creditor_incarnation
        generations = {held.grant_id: held.generation for held in reply.held} if same_life else {}
        self._wanted_back[sent.creditor_id] = reply.wanted_back_blocks
        lost: list[int] = []
        for held in asked.held:
            key = GrantKey(sent.creditor_id, asked.creditor_incarnation, held.grant_id)
            loan = self.grants.get(key)
            if loan is None:
                continue
            if held.grant_id in generations:
                loan.renew(sent_s, reply.lease_s)
                loan.generation = max(loan.generation, generations[held.grant_id])
            else:
                lost += self.on_grant_over(key)
        return lost

    def tick(self, now_s: float) -> list[int]:
        """End leases that ran out; return the lost logical blocks."""
        over = [key for key, loan in self.grants.items() if now_s >= loan.ends_s]
        return [number for key in over for number in self.on_grant_over(key)]

    def on_creditor_gone(self, creditor_id: str) -> list[int]:
        """Give up a creditor; return the lost logical blocks."""
        gone = [key for key in self.grants if key.creditor_id == creditor_id]
        self._wanted_back.pop(creditor_id, None)
        return [number for key in gone for number in self.on_grant_over(key)]

    def on_grant_over(self, key: GrantKey) -> list[int]:
        """Drop a grant that has ended; return the lost logical blocks."""
        loan = self.grants.get(key)
        numbers = [] if loan is None else list(loan.blocks.values())
        for number in numbers:
            self._free.pop(number, None)
        if numbers:
            self._remove(key, numbers)
        return numbers

    def wanted_back(self) -> dict[str, int]:
        """Return the device blocks that creditors want back, by creditor."""
        return {name: blocks for name, blocks in self._wanted_back.items() if blocks}

    def check_integrity(self) -> None:
        """Raise AssertionError when grants, blocks and free blocks disagree."""
        assert set(self._free) == set(self.in_state(BlockState.FREE)), "free blocks out of step"
        owned = [number for loan in self.grants.values() for number in loan.blocks.values()]
        assert sorted(owned) == sorted(self.blocks), "a borrowed block has no grant, or two"
        for number, block in self.blocks.items():
            loan = self.grants[block.grant]
            assert number < self._next and loan.blocks[block.physical] == number and loan.tier is block.tier
            assert block.grant.creditor_id != self._worker_id, "a worker owes itself"
            assert not block.is_orphan or block.state is BlockState.FROZEN
        assert all(loan.blocks for loan in self.grants.values()), "an empty grant was kept"

    def _return(self, numbers: list[int]) -> list[Repayment]:
        for number in numbers:
            self._free.pop(number, None)
            self.blocks[number].state = BlockState.RETURNING
        return self._repayments(numbers)

    def _repayments(self, numbers: Iterable[int]) -> list[Repayment]:
        by_grant: dict[GrantKey, list[int]] = {}
        for number in numbers:
            by_grant.setdefault(self.blocks[number].grant, []).append(self.blocks[number].physical)
        return [
            Repayment(
                key.creditor_id,
                ReturnBlocks(
                    debtor_id=self._worker_id,
                    debtor_incarnation=self._incarnation,
                    creditor_incarnation=key.creditor_incarnation,
                    grant_id=key.grant_id,
                    blocks=tuple(blocks),
                ),
            )
            for key, blocks in by_grant.items()
        ]

    def _renewal(self, keys: list[GrantKey], now_s: float) -> Renewal:
        held: list[HeldGrant] = []
        for key in keys:
            loan = self.grants[key]
            loan.renew_s = now_s + max(0.0, loan.ends_s - now_s) / _RENEWALS_IN_A_LEASE
            held.append(HeldGrant(grant_id=key.grant_id, generation=loan.generation))
        message = RenewLeases(
            debtor_id=self._worker_id,
            debtor_incarnation=self._incarnation,
            creditor_incarnation=keys[0].creditor_incarnation,
            held=tuple(held),
        )
        return Renewal(keys[0].creditor_id, message)

    def _remove(self, key: GrantKey, numbers: Iterable[int]) -> None:
        """Remove blocks of a grant, and the grant with its last block."""
        for number in numbers:
            del self.grants[key].blocks[self.blocks.pop(number).physical]
        if not self.grants[key].blocks:
            del self.grants[key]
