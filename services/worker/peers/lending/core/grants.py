"""The creditor's side: what this worker lends to whom, until when, and who may access it. Pure.

It serves requests in order, out of free memory up to a cap, and grants a part where there is no more. Device
and host memory have separate grants and caps. The caller withdraws the blocks from the tier's pool, and puts
back those that methods return as freed. Leases end by this worker's clock only, `grace_s` later than the
debtor was told.
Source: papers/001 §4.4; `algorithms.md` §4.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from services.worker.peers.lending.core.table import LentRow, RBlockTable
from shared.liveness import Start
from shared.messages.lending import (
    MOST_GRANT_BLOCKS,
    BlocksReturned,
    BorrowBlocks,
    BorrowReply,
    Grant,
    HeldGrant,
    KvTier,
    LeasesRenewed,
    Refusal,
    RenewLeases,
    ReturnBlocks,
)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms under which a worker lends."""

    most_blocks: int
    """Most device blocks to lend; 0 lends none."""
    lease_s: float = 5.0
    grace_s: float = 0.5
    fingerprint: bytes = b""
    """Names the layout of this worker's KV. Empty matches no debtor."""
    most_host_blocks: int = 0
    host_attends: bool = True
    """This worker attends over lent host blocks; else they are only written and fetched."""
    is_host_for_caches: bool = False
    """Sequences cannot use its host blocks; only prefix caches can."""

    def most(self, tier: KvTier) -> int:
        """Return the most blocks to lend of a tier."""
        return self.most_blocks if tier is KvTier.DEVICE else self.most_host_blocks


@dataclass(slots=True)
class Lent:
    """One grant, on the creditor's side."""

    grant_id: int
    debtor: Start
    """Worker id and incarnation."""
    request: int
    tier: KvTier
    blocks: dict[int, None]
    generation: int
    ends_s: float
    for_cache: bool = False
    """A sequence that needs the memory may end it."""
    users: int = 0
    """Number of reads, writes and queries in progress."""
    over: bool = False
    """Ended; its last user frees its blocks."""
    parting: list[int] = field(default_factory=list)
    """Blocks returned while the grant had users."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Blocks to put back into the pool of their tier."""

    tier: KvTier
    blocks: tuple[int, ...]


P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: "Callable[Concatenate[Grants, P], R]") -> "Callable[Concatenate[Grants, P], R]":
    """Run a method under the lock of its grants."""

    @wraps(method)
    def run(self: "Grants", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return run


class Grants:
    """Grants of one incarnation of a worker.

    The event loop gives and ends grants, and threads that serve links enter them. `lock` (reentrant) protects
    both."""

    def __init__(
        self,
        table: RBlockTable,
        incarnation: int,
        terms: Terms,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.terms = terms
        self.lock = lock or nullcontext()
        self._table = table
        self._incarnation = incarnation
        self._grants: dict[int, Lent] = {}
        self._by_debtor: dict[str, dict[int, Lent]] = {}
        self._next_id = 1
        self.frozen = False
        """A settlement is running: no new grants."""

    def __len__(self) -> int:
        return len(self._grants)

    @property
    def lent_blocks(self) -> int:
        """Number of lent blocks, those of ended grants with users included."""
        return self._table.lent_blocks()

    @_locked
    def debtors(self) -> set[str]:
        """Return the worker ids that hold grants."""
        return set(self._by_debtor)

    @_locked
    def generation(self, grant_id: int) -> int | None:
        """Return the generation of a grant; None once it has ended."""
        lent = self._grants.get(grant_id)
        return None if lent is None or lent.over else lent.generation

    @_locked
    def generation_for(self, debtor: Start, grant_id: int) -> int | None:
        """Return the generation of a grant; None when it is not this debtor's."""
        lent = self._of(*debtor, grant_id)
        return None if lent is None else lent.generation

    @_locked
    def answer(self, asked: BorrowBlocks) -> BorrowReply | int:
        """Return the reply, or the most blocks to lend when it depends on free memory."""
        for lent in self._by_debtor.get(asked.debtor_id, {}).values():
            if lent.request == asked.request and lent.debtor[1] == asked.debtor_incarnation and not lent.over:
                return BorrowReply(grant=self._grant(lent))
        if not asked.fingerprint or asked.fingerprint != self.terms.fingerprint:
            return BorrowReply(refusal=Refusal.OTHER_KV)
        cap = self.terms.most(asked.tier)
        if cap == 0 or self.frozen or asked.debtor_id == self._table.worker_id:
            return BorrowReply(refusal=Refusal.NOT_LENDING)
        room = min(cap - self._table.lent_blocks(asked.tier), asked.blocks, MOST_GRANT_BLOCKS)
        if room < max(1, asked.least_blocks):
            return BorrowReply(refusal=Refusal.AT_CAP)
        return room

    @_locked
    def lend(self, asked: BorrowBlocks, blocks: Sequence[int], now_s: float) -> BorrowReply:
        """Enter a grant of `blocks`, withdrawn from the pool. Without blocks, refuse."""
        if not blocks:
            return BorrowReply(refusal=Refusal.NOTHING_FREE)
        lent = Lent(
            grant_id=self._next_id,
            debtor=(asked.debtor_id, asked.debtor_incarnation),
            request=asked.request,
            tier=asked.tier,
            blocks=dict.fromkeys(blocks),
            generation=1,
            ends_s=self._end_s(now_s),
            for_cache=asked.for_cache,
        )
        self._table.lend(asked.tier, blocks, LentRow(asked.debtor_id, lent.grant_id))
        self._next_id += 1
        self._grants[lent.grant_id] = lent
        self._by_debtor.setdefault(asked.debtor_id, {})[lent.grant_id] = lent
        return BorrowReply(grant=self._grant(lent))

    @_locked
    def renew(self, asked: RenewLeases, now_s: float, *, short_blocks: int = 0) -> LeasesRenewed:
        """Renew the named grants that have not ended by this worker's clock.

        `short_blocks`: device blocks that this worker lacks; each debtor is asked for its share."""
        held: list[HeldGrant] = []
        mine = asked.creditor_incarnation == self._incarnation
        for named in asked.held if mine else ():
            lent = self._of(asked.debtor_id, asked.debtor_incarnation, named.grant_id)
            if lent is not None and now_s < lent.ends_s:
                lent.ends_s = self._end_s(now_s)
                held.append(HeldGrant(grant_id=lent.grant_id, generation=lent.generation))
        owed = sum(
            len(lent.blocks)
            for lent in self._by_debtor.get(asked.debtor_id, {}).values()
            if lent.tier is KvTier.DEVICE
        )
        share = -(-short_blocks * owed // max(1, self._table.lent_blocks(KvTier.DEVICE)))
        return LeasesRenewed(
            creditor_incarnation=self._incarnation,
            lease_s=self.terms.lease_s,
            held=tuple(held),
            wanted_back_blocks=min(owed, max(0, share)),
        )

    @_locked
    def give_back(self, asked: ReturnBlocks) -> tuple[BlocksReturned, Freed | None]:
        """Take blocks back from a debtor. Blocks outside its grant are ignored."""
        mine = asked.creditor_incarnation == self._incarnation
        lent = self._of(asked.debtor_id, asked.debtor_incarnation, asked.grant_id) if mine else None
        if lent is None:
            return BlocksReturned(generation=0), None
        returned = [block for block in dict.fromkeys(asked.blocks) if block in lent.blocks]
        if returned:
            lent.generation += 1
        for block in returned:
            del lent.blocks[block]
        freed = self._part(lent, returned)
        return BlocksReturned(generation=lent.generation), freed

    @_locked
    def tick(self, now_s: float) -> list[Freed]:
        """End the leases that ran out."""
        return self._end([lent for lent in self._grants.values() if now_s >= lent.ends_s and not lent.over])

    @_locked
    def yielding_blocks(self, tier: KvTier) -> int:
        """Number of blocks lent to caches."""
        found = (lent for lent in self._grants.values() if lent.for_cache and lent.tier is tier)
        return sum(len(lent.blocks) for lent in found)

    @_locked
    def give_way(self, tier: KvTier, blocks: int) -> list[Freed]:
        """End grants of caches, newest first, until `blocks` come back for a sequence.

        Users of an ended grant finish before its blocks are freed."""
        ended: list[Lent] = []
        for lent in reversed(self._grants.values()):
            if blocks <= 0:
                break
            if lent.for_cache and lent.tier is tier and not lent.over:
                blocks -= len(lent.blocks)
                ended.append(lent)
        return self._end(ended)

    @_locked
    def on_incarnation(self, debtor_id: str, incarnation: int) -> list[Freed]:
        """End the grants of a debtor's earlier incarnations."""
        gone = [
            lent
            for lent in self._by_debtor.get(debtor_id, {}).values()
            if lent.debtor[1] != incarnation and not lent.over
        ]
        return self._end(gone)

    @_locked
    def enter(self, grant_id: int, generation: int, blocks: Iterable[int], now_s: float) -> bool:
        """Return whether blocks of a grant may be used now; if so, `leave` must follow.

        False for an unknown generation, a lease that ran out, or a block outside the grant. An earlier
        generation is valid for blocks that are left: a debtor learns of a new one late, and blocks only ever
        leave a grant."""
        lent = self._grants.get(grant_id)
        if lent is None or lent.over or generation > lent.generation or now_s >= lent.ends_s:
            return False
        if any(block not in lent.blocks for block in blocks):
            return False
        lent.users += 1
        return True

    @_locked
    def leave(self, grant_id: int) -> Freed | None:
        """End an `enter`. The last user frees blocks that were returned or ended meanwhile."""
        lent = self._grants[grant_id]
        if lent.users < 1:
            raise ValueError(f"grant {grant_id} has no users")
        lent.users -= 1
        return self._part(lent, [])

    def check_integrity(self) -> None:
        """Raise AssertionError when grants and table disagree, or more is lent than the cap allows."""
        rows = {
            (lent.tier, block): LentRow(lent.debtor[0], lent.grant_id)
            for lent in self._grants.values()
            for block in (*lent.blocks, *lent.parting)
        }
        assert len(rows) == sum(len(lent.blocks) + len(lent.parting) for lent in self._grants.values())
        assert all(self._table.lent_row(*at) == row for at, row in rows.items()), "lent to another debtor"
        assert len(rows) == self.lent_blocks, "a lent block belongs to no grant"
        assert all(self._table.lent_blocks(tier) <= self.terms.most(tier) for tier in KvTier)
        for grant_id, lent in self._grants.items():
            assert grant_id == lent.grant_id and self._by_debtor[lent.debtor[0]][grant_id] is lent
            assert lent.blocks or lent.users, "an empty grant was kept"
            assert lent.users or not (lent.over or lent.parting), "freed blocks are held back without users"
        assert sum(map(len, self._by_debtor.values())) == len(self._grants)

    def _of(self, debtor_id: str, incarnation: int, grant_id: int) -> Lent | None:
        lent = self._grants.get(grant_id)
        ok = lent is not None and lent.debtor == (debtor_id, incarnation) and not lent.over
        return lent if ok else None

    def _end_s(self, now_s: float) -> float:
        return now_s + self.terms.lease_s + self.terms.grace_s

    def _grant(self, lent: Lent) -> Grant:
        return Grant(
            creditor_id=self._table.worker_id,
            creditor_incarnation=self._incarnation,
            grant_id=lent.grant_id,
            generation=lent.generation,
            tier=lent.tier,
            blocks=tuple(lent.blocks),
            lease_s=self.terms.lease_s,
            attends=lent.tier is KvTier.DEVICE or self.terms.host_attends,
        )

    def _end(self, ended: Iterable[Lent]) -> list[Freed]:
        freed: list[Freed] = []
        for lent in list(ended):
            lent.over = True
            lent.generation += 1
            blocks = list(lent.blocks)
            lent.blocks.clear()
            part = self._part(lent, blocks)
            freed += [] if part is None else [part]
        return freed

    def _part(self, lent: Lent, blocks: list[int]) -> Freed | None:
        """Take blocks out of a grant once it has no users, and forget an empty grant."""
        lent.parting += blocks
        if lent.users:
            if blocks:
                self._table.part(lent.tier, blocks)
            return None
        freed, lent.parting = lent.parting, []
        if freed:
            self._table.take_back(lent.tier, freed)
        if not lent.blocks:
            del self._grants[lent.grant_id]
            of_debtor = self._by_debtor[lent.debtor[0]]
            del of_debtor[lent.grant_id]
            if not of_debtor:
                del self._by_debtor[lent.debtor[0]]
        return Freed(lent.tier, tuple(freed)) if freed else None
