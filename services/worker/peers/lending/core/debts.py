"""The debtor's side: borrowed blocks, which of them are in use, and when leases must be renewed. Pure.

A lease counts from when the question was *sent*, so this worker gives a block up before its creditor does.
Sends nothing; knows neither sequences nor bytes. Source: papers/001 §4.4; `algorithms.md` §4.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.worker.peers.lending.core.table import BlockState, GrantKey, RBlockTable
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


@dataclass(slots=True)
class LoanLease:
    """Lease of one grant."""

    ends_s: float
    renew_s: float
    """When to ask for a renewal next."""


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


class Debts:
    """Blocks that one incarnation of a worker owes to others."""

    def __init__(self, table: RBlockTable, incarnation: int) -> None:
        self._table = table
        self._incarnation = incarnation
        self._leases: dict[GrantKey, LoanLease] = {}
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
        return sum(self._table.borrowed_from().values())

    def on_granted(self, grant: Grant, sent_s: float) -> list[int]:
        """Enter a grant and return its logical blocks; none for a known grant.

        `sent_s`: when the question was sent."""
        key = GrantKey(grant.creditor_id, grant.creditor_incarnation, grant.grant_id)
        if key in self._leases:
            return []
        logical = self._table.add(grant)
        self._leases[key] = _lease(sent_s, grant.lease_s)
        self._free.update(dict.fromkeys(logical))
        return logical

    def take(self, blocks: int) -> list[int]:
        """Take that many free blocks into use, oldest grants first. Raises ValueError if there are fewer."""
        if not 0 <= blocks <= len(self._free):
            raise ValueError(f"{blocks} borrowed blocks asked for, {len(self._free)} free")
        taken = [number for number, _ in zip(self._free, range(blocks), strict=False)]
        for number in taken:
            del self._free[number]
            self._table.borrowed(number).state = BlockState.USED
        return taken

    def use(self, logical: Iterable[int]) -> None:
        """Take exactly these blocks into use. Raises ValueError for one that is not free."""
        for number in logical:
            if number not in self._free:
                raise ValueError(f"borrowed block {number} is not free")
            del self._free[number]
            self._table.borrowed(number).state = BlockState.USED

    def release(self, logical: Iterable[int]) -> None:
        """End the use of blocks. Frozen ones become free once they thaw; lost ones are skipped."""
        for number in logical:
            if not self.holds(number):
                continue
            block = self._table.borrowed(number)
            if block.state is BlockState.FROZEN:
                block.is_orphan = True
            elif block.state is BlockState.USED:
                block.state = BlockState.FREE
                self._free[number] = None
            else:
                raise ValueError(f"borrowed block {number} is {block.state}, not used")

    def freeze(self, logical: Iterable[int]) -> None:
        """Freeze used blocks. Raises ValueError for others."""
        chosen = [self._table.borrowed(number) for number in logical]
        if any(block.state is not BlockState.USED for block in chosen):
            raise ValueError("only blocks in use can be frozen")
        for block in chosen:
            block.state = BlockState.FROZEN

    def thaw(self, logical: Iterable[int]) -> None:
        """End `freeze`. Blocks released meanwhile become free."""
        for number in logical:
            if self.holds(number) and self._table.borrowed(number).state is BlockState.FROZEN:
                block = self._table.borrowed(number)
                block.state = BlockState.USED
                if block.is_orphan:
                    block.is_orphan = False
                    self.release([number])

    def give_back(self, blocks: int, creditors: Iterable[str] = ()) -> list[Repayment]:
        """Return up to `blocks` free blocks to their creditors.

        Order: device memory of creditors that are short, of `creditors`, host memory, newest grants."""
        pressing = self._pressing()
        order = {name: at for at, name in enumerate([*pressing, *creditors])}

        def rank(number: int) -> tuple[int, bool, int]:
            place = self._table.resolve(number)
            helps = place.tier is KvTier.DEVICE or place.worker_id not in pressing
            return (
                order.get(place.worker_id, len(order)) if helps else len(order),
                place.tier is KvTier.DEVICE,
                -number,
            )

        return self._return(sorted(self._free, key=rank)[: max(0, blocks)])

    def recalled(self, logical: Iterable[int]) -> list[Repayment]:
        """Return frozen blocks whose KV has been copied home."""
        numbers = [number for number in logical if self.holds(number)]
        for number in numbers:
            self._table.borrowed(number).is_orphan = False
        return self._return(numbers)

    def retries(self) -> list[Repayment]:
        """Return the repayments that no creditor has confirmed."""
        return self._repayments(self._table.in_state(BlockState.RETURNING))

    def on_returned(self, sent: Repayment, reply: BlocksReturned) -> None:
        """Forget blocks whose return the creditor confirmed."""
        asked = sent.message
        key = GrantKey(sent.creditor_id, asked.creditor_incarnation, asked.grant_id)
        held = set(self._table.of_grant(key))
        gone = [n for n in held if self._table.resolve(n).physical in set(asked.blocks)]
        returning = [n for n in gone if self._table.borrowed(n).state is BlockState.RETURNING]
        eased = sum(self._table.resolve(n).tier is KvTier.DEVICE for n in returning)
        wanted = self._wanted_back.get(sent.creditor_id, 0) - eased
        self._wanted_back[sent.creditor_id] = max(0, wanted)
        self._table.set_generation(key, reply.generation)
        self._table.remove(returning)
        if not self._table.of_grant(key):
            self._leases.pop(key, None)

    def renewals(self, now_s: float) -> list[Renewal]:
        """Return the renewals due, one message per creditor incarnation, and schedule their retry."""
        due: dict[tuple[str, int], list[GrantKey]] = {}
        for key in self._leases:
            if any(
                self._table.borrowed(n).state is not BlockState.RETURNING for n in self._table.of_grant(key)
            ):
                due.setdefault((key.creditor_id, key.creditor_incarnation), []).append(key)
        return [
            self._renewal(keys, now_s)
            for keys in due.values()
            if any(now_s >= self._leases[key].renew_s for key in keys)
        ]

    def on_renewed(self, sent: Renewal, reply: LeasesRenewed, sent_s: float) -> list[int]:
        """Extend leases; return the lost logical blocks, whose grant has ended at the creditor."""
        asked = sent.message
        generations = {held.grant_id: held.generation for held in reply.held}
        same_life = reply.creditor_incarnation == asked.creditor_incarnation
        self._wanted_back[sent.creditor_id] = reply.wanted_back_blocks
        lost: list[int] = []
        for held in asked.held:
            key = GrantKey(sent.creditor_id, asked.creditor_incarnation, held.grant_id)
            if key not in self._leases:
                continue
            if same_life and held.grant_id in generations:
                self._leases[key] = _lease(sent_s, reply.lease_s)
                self._table.set_generation(key, generations[held.grant_id])
            else:
                lost += self._lose(key)
        return lost

    def tick(self, now_s: float) -> list[int]:
        """End leases that ran out; return the lost logical blocks."""
        over = [key for key, lease in self._leases.items() if now_s >= lease.ends_s]
        return [number for key in over for number in self._lose(key)]

    def on_creditor_gone(self, creditor_id: str) -> list[int]:
        """Give up a creditor; return the lost logical blocks."""
        gone = [key for key in self._leases if key.creditor_id == creditor_id]
        self._wanted_back.pop(creditor_id, None)
        return [number for key in gone for number in self._lose(key)]

    def on_grant_over(self, key: GrantKey) -> list[int]:
        """Drop a grant that its creditor ended; return the lost logical blocks."""
        return self._lose(key) if key in self._leases else []

    def wanted_back_blocks(self) -> int:
        """Number of blocks that creditors want back."""
        return sum(self._wanted_back.values())

    def wanted_back_by_creditor(self) -> dict[str, int]:
        return {name: blocks for name, blocks in self._wanted_back.items() if blocks}

    def holds(self, logical: int) -> bool:
        """Return whether a block is still borrowed, or on its way back."""
        try:
            self._table.borrowed(logical)
        except KeyError:
            return False
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when leases, free blocks and table disagree."""
        assert set(self._leases) == set(self._table.grants()), "a grant without a lease, or the reverse"
        assert set(self._free) == set(self._table.in_state(BlockState.FREE)), "free blocks out of step"

    def _pressing(self) -> list[str]:
        short = [(-blocks, name) for name, blocks in self._wanted_back.items() if blocks > 0]
        return [name for _, name in sorted(short)]

    def _return(self, numbers: list[int]) -> list[Repayment]:
        for number in numbers:
            self._free.pop(number, None)
            self._table.borrowed(number).state = BlockState.RETURNING
        return self._repayments(numbers)

    def _repayments(self, numbers: Iterable[int]) -> list[Repayment]:
        by_grant: dict[GrantKey, list[int]] = {}
        for number in numbers:
            place = self._table.resolve(number)
            assert place.grant is not None
            by_grant.setdefault(place.grant, []).append(place.physical)
        return [
            Repayment(
                key.creditor_id,
                ReturnBlocks(
                    debtor_id=self._table.worker_id,
                    debtor_incarnation=self._incarnation,
                    creditor_incarnation=key.creditor_incarnation,
                    grant_id=key.grant_id,
                    blocks=tuple(blocks),
                ),
            )
            for key, blocks in by_grant.items()
        ]

    def _renewal(self, keys: list[GrantKey], now_s: float) -> Renewal:
        for key in keys:
            lease = self._leases[key]
            lease.renew_s = now_s + max(0.0, lease.ends_s - now_s) / _RENEWALS_IN_A_LEASE
        held = tuple(HeldGrant(grant_id=key.grant_id, generation=self._table.generation(key)) for key in keys)
        message = RenewLeases(
            debtor_id=self._table.worker_id,
            debtor_incarnation=self._incarnation,
            creditor_incarnation=keys[0].creditor_incarnation,
            held=held,
        )
        return Renewal(keys[0].creditor_id, message)

    def _lose(self, key: GrantKey) -> list[int]:
        numbers = self._table.of_grant(key)
        for number in numbers:
            self._free.pop(number, None)
        self._table.remove(numbers)
        del self._leases[key]
        return numbers


def _lease(sent_s: float, lease_s: float) -> LoanLease:
    return LoanLease(sent_s + lease_s, sent_s + lease_s / _RENEWALS_IN_A_LEASE)
