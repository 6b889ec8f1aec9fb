"""The rBlock table: where each logical block of this worker's KV is, and which debtor holds its own blocks.

Logical numbers below `local_ids` are own blocks and equal their physical numbers. Numbers above are borrowed,
and map to a block on a creditor's device or in its host memory, under a grant:

    local_blocks 4; grant 7 of worker b: its blocks 30 and 12
    logical    0 1 2 3    own, block 0 … 3
    logical    4 5        b's blocks 30 and 12, under (b, its incarnation, 7)

A borrowed block is free, used by a sequence, frozen (used, and on its way home), or returning. Own host
memory (`host_blocks`) has no logical numbers: it is only lent. Knows no bytes and no leases.

Borrowed blocks belong to one thread. Threads that serve links free lent blocks as well: callers that change
lent blocks hold a lock, and counting them is always safe.
Source: papers/001 §4.3 (Figure 3); `algorithms.md` §4.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from shared.messages.lending import Grant, KvTier


@dataclass(frozen=True, slots=True)
class GrantKey:
    """Global name of a grant."""

    creditor_id: str
    creditor_incarnation: int
    grant_id: int


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Location of a block: `physical` is its number within that tier of that worker."""

    worker_id: str
    tier: KvTier
    physical: int
    grant: GrantKey | None = None
    """None: this worker's own."""


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
    """One borrowed block, on the debtor's side."""

    place: BlockPlace
    state: BlockState = BlockState.FREE
    is_orphan: bool = False
    """Frozen, and its sequence has ended: thawing frees it."""


@dataclass(frozen=True, slots=True)
class LentRow:
    """Debtor and grant of a lent block."""

    debtor_id: str
    grant_id: int


class RBlockTable:
    """Table of one worker. Logical numbers of borrowed blocks are never reused."""

    def __init__(
        self, worker_id: str, local_blocks: int, host_blocks: int = 0, *, local_ids: int | None = None
    ) -> None:
        """`local_ids`: more than the device's blocks where Pie keeps some in host memory."""
        self.worker_id = worker_id
        self.local_blocks = local_blocks
        self.host_blocks = host_blocks
        self._borrowed: dict[int, Borrowed] = {}
        self._by_grant: dict[GrantKey, dict[int, int]] = {}
        """Physical → logical."""
        self._generations: dict[GrantKey, int] = {}
        self._local_ids = local_blocks if local_ids is None else local_ids
        self._next = self._local_ids
        self._grant_of = {tier: np.zeros(self.own_blocks(tier), dtype=np.int64) for tier in KvTier}
        """Grant of each own block, negative while it is on its way back; 0: not lent."""
        self._lent: dict[tuple[KvTier, LentRow], int] = {}
        """Blocks by grant. Replaced, never changed in place: other threads iterate over it."""

    # --- borrowed blocks

    def add(self, grant: Grant) -> list[int]:
        """Enter a grant and return its logical numbers. Raises ValueError for a known or own grant."""
        key = GrantKey(grant.creditor_id, grant.creditor_incarnation, grant.grant_id)
        if key in self._by_grant or grant.creditor_id == self.worker_id:
            raise ValueError(f"{key} is entered already, or this worker's own")
        numbers = self._by_grant[key] = {}
        for physical in grant.blocks:
            numbers[physical] = self._next
            self._borrowed[self._next] = Borrowed(BlockPlace(grant.creditor_id, grant.tier, physical, key))
            self._next += 1
        self._generations[key] = grant.generation
        return list(numbers.values())

    def remove(self, logical: Iterable[int]) -> None:
        """Remove borrowed blocks, and grants without any."""
        for number in list(logical):
            place = self._borrowed.pop(number).place
            assert place.grant is not None
            del self._by_grant[place.grant][place.physical]
            if not self._by_grant[place.grant]:
                del self._by_grant[place.grant], self._generations[place.grant]

    def resolve(self, logical: int) -> BlockPlace:
        """Return the place of a block. Raises KeyError for an unknown borrowed block."""
        if 0 <= logical < self._local_ids:
            return BlockPlace(self.worker_id, KvTier.DEVICE, logical)
        return self._borrowed[logical].place

    def generation(self, grant: GrantKey) -> int:
        """Return the generation to name with every access. Raises KeyError for an ended grant."""
        return self._generations[grant]

    def set_generation(self, grant: GrantKey, generation: int) -> None:
        """Record a generation; an older one that arrives late changes nothing."""
        if grant in self._generations:
            self._generations[grant] = max(generation, self._generations[grant])

    def borrowed(self, logical: int) -> Borrowed:
        """Return a borrowed block. Raises KeyError."""
        return self._borrowed[logical]

    def of_grant(self, grant: GrantKey) -> list[int]:
        """Return the logical numbers of the blocks left in a grant."""
        return list(self._by_grant.get(grant, {}).values())

    def grants(self) -> list[GrantKey]:
        return list(self._by_grant)

    def borrowed_from(self, tier: KvTier | None = None) -> dict[str, int]:
        """Return the number of borrowed blocks by creditor, of one tier or both."""
        counts: dict[str, int] = {}
        for key, numbers in self._by_grant.items():
            count = len(numbers) if tier is None or self._tier_of(numbers) is tier else 0
            if count:
                counts[key.creditor_id] = counts.get(key.creditor_id, 0) + count
        return counts

    def in_state(self, state: BlockState) -> list[int]:
        return [number for number, block in self._borrowed.items() if block.state is state]

    def used_at(self, creditor_id: str, tier: KvTier | None = None) -> list[int]:
        """Return the logical numbers in use, but not frozen, at one creditor, of one tier or both."""
        return [
            number
            for number, block in self._borrowed.items()
            if block.state is BlockState.USED
            and block.place.worker_id == creditor_id
            and (tier is None or block.place.tier is tier)
        ]

    def lenders(self) -> list[tuple[str, KvTier]]:
        """Return the creditors and tiers that blocks are borrowed from."""
        found = {(block.place.worker_id, block.place.tier) for block in self._borrowed.values()}
        return sorted(found)

    # --- lent blocks

    def lend(self, tier: KvTier, blocks: Iterable[int], row: LentRow) -> None:
        """Lend own blocks. Raises ValueError, and lends none, for unknown or lent blocks."""
        at = _indices(blocks)
        is_free = self._are_there(tier, at) and len(np.unique(at)) == len(at)
        if not is_free or self._grant_of[tier][at].any():
            raise ValueError(f"some {tier} block of {at.tolist()} is not this worker's, or lent already")
        self._grant_of[tier][at] = row.grant_id
        self._lent = {**self._lent, (tier, row): self._lent.get((tier, row), 0) + len(at)}

    def own_blocks(self, tier: KvTier) -> int:
        """Return the number of own blocks of a tier."""
        return self.local_blocks if tier is KvTier.DEVICE else self.host_blocks

    def part(self, tier: KvTier, blocks: Iterable[int]) -> None:
        """Mark lent blocks as on their way back: `grants_of` ignores them."""
        at = _indices(blocks)
        self._grant_of[tier][at] = -np.abs(self._grant_of[tier][at])

    def take_back(self, tier: KvTier, blocks: Iterable[int]) -> None:
        """End loans. Raises KeyError, and changes nothing, for blocks that are not lent."""
        at = _indices(blocks)
        found = np.abs(self._grant_of[tier][at]) if self._are_there(tier, at) else at[:0]
        if len(found) < len(at) or not found.all():
            raise KeyError(f"some {tier} block of {at.tolist()} is not lent")
        self._grant_of[tier][at] = 0
        back = {
            int(grant): int(count) for grant, count in zip(*np.unique(found, return_counts=True), strict=True)
        }
        left = {
            (at_tier, row): count - (back.get(row.grant_id, 0) if at_tier is tier else 0)
            for (at_tier, row), count in self._lent.items()
        }
        self._lent = {key: count for key, count in left.items() if count}

    def grants_of(
        self, tier: KvTier, blocks: npt.NDArray[np.int32], grants: Sequence[int]
    ) -> npt.NDArray[np.int64] | None:
        """Return the grant of each block; None when one belongs to none of `grants`."""
        if not self._are_there(tier, blocks):
            return None
        found: npt.NDArray[np.int64] = self._grant_of[tier][blocks]
        is_lent = (found == grants[0]).all() if len(grants) == 1 else np.isin(found, grants).all()
        return found if is_lent else None

    def lent_under(self, tier: KvTier, grants: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return, by block of the tier, which of `grants` it belongs to; 0: none."""
        found = self._grant_of[tier]
        under: npt.NDArray[np.int64] = np.where(np.isin(found, grants), found, 0)
        return under

    def lent_row(self, tier: KvTier, block: int) -> LentRow | None:
        grant_id = abs(int(self._grant_of[tier][block])) if 0 <= block < self.own_blocks(tier) else 0
        rows = [row for at, row in self._lent if at is tier and row.grant_id == grant_id]
        return rows[0] if rows else None

    def lent_blocks(self, tier: KvTier | None = None) -> int:
        """Return the number of lent blocks, of one tier or both."""
        return sum(count for (at, _), count in self._lent.items() if tier is None or at is tier)

    def lent_to(self, tier: KvTier | None = None) -> dict[str, int]:
        """Return the number of lent blocks by debtor, of one tier or both."""
        counts: dict[str, int] = {}
        for (at, row), count in self._lent.items():
            if tier is None or at is tier:
                counts[row.debtor_id] = counts.get(row.debtor_id, 0) + count
        return counts

    def _are_there(self, tier: KvTier, at: npt.NDArray[np.integer]) -> bool:
        return not len(at) or (int(at.min()) >= 0 and int(at.max()) < self.own_blocks(tier))

    def _tier_of(self, numbers: dict[int, int]) -> KvTier:
        """Return the tier of a grant's blocks."""
        return self._borrowed[next(iter(numbers.values()))].place.tier

    def check_integrity(self) -> None:
        """Raise AssertionError when the table is inconsistent."""
        borrowed = {number for numbers in self._by_grant.values() for number in numbers.values()}
        assert borrowed == set(self._borrowed), "a borrowed block has no grant, or two"
        assert set(self._by_grant) == set(self._generations)
        for number, block in self._borrowed.items():
            place = block.place
            assert self._local_ids <= number < self._next
            assert place.grant is not None and place.worker_id == place.grant.creditor_id
            assert place.worker_id != self.worker_id, "a worker owes itself"
            assert self._by_grant[place.grant][place.physical] == number
            assert not block.is_orphan or block.state is BlockState.FROZEN
        for tier in KvTier:
            ids, counts = np.unique(np.abs(self._grant_of[tier]), return_counts=True)
            found = {int(grant): int(count) for grant, count in zip(ids, counts, strict=True) if grant}
            entered = {row.grant_id: count for (at, row), count in self._lent.items() if at is tier}
            assert found == entered, "lent blocks and their counts disagree"


def _indices(blocks: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(blocks, dtype=np.int64)
