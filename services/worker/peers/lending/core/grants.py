"""The creditor's side: what this worker lends to whom, until when, and who may access it. Pure.

It serves requests in order, out of free memory up to a cap, and grants a part where there is no more. Device
and host memory have separate grants and caps. The caller withdraws the blocks from the tier's pool, and puts
back those that methods return as freed. Leases end by this worker's clock only, `grace_s` later than the
debtor was told.
Source: papers/001 §4.3, §4.4; `algorithms.md` §4.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from services.worker.kv.core.borrowed_pool import OwnPool
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


def lend(pool: OwnPool, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
    """Withdraw up to `most_blocks`, or none below `least_blocks`; `keep_blocks` stay free.

    Cached prefixes are evicted first. Returns the blocks' places in the engine's memory."""
    spare_blocks = pool.free_blocks + pool.evictable_blocks - keep_blocks
    blocks = min(most_blocks, spare_blocks, pool.base.lendable_blocks)
    if blocks < max(1, least_blocks):
        return []
    return pool.withdraw(pool.allocate(blocks))


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
    """Grants of one incarnation of a worker with `blocks` own blocks, and `host_blocks` in host memory.

    The event loop gives and ends grants, and threads that serve links enter them. `lock` (reentrant) protects
    both."""

    def __init__(
        self,
        worker_id: str,
        incarnation: int,
        terms: Terms,
        blocks: int,
        host_blocks: int = 0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.terms = terms
        self.lock = lock or nullcontext()
        self._worker_id = worker_id
        self._incarnation = incarnation
        self.host_blocks = host_blocks
        self._grants: dict[int, Lent] = {}
        self._grant_of = {
            KvTier.DEVICE: np.zeros(blocks, dtype=np.int64),
            KvTier.HOST: np.zeros(host_blocks, dtype=np.int64),
        }
        """Grant of each own block, negative while it is on its way back; 0: not lent."""
        self._next_id = 1
        self.frozen = False
        """A settlement is running: no new grants."""

    @_locked
    def lent_to(self, tier: KvTier | None = None) -> dict[str, int]:
        """Return the number of lent blocks by debtor, of one tier or both, those on their way back
        included."""
        counts: Counter[str] = Counter()
        for lent in self._grants.values():
            if tier is None or lent.tier is tier:
                counts[lent.debtor[0]] += len(lent.blocks) + len(lent.parting)
        return dict(counts)

    def lent_blocks(self, tier: KvTier | None = None) -> int:
        """Return the number of lent blocks, of one tier or both."""
        return sum(self.lent_to(tier).values())

    @_locked
    def answer(self, asked: BorrowBlocks) -> BorrowReply | int:
        """Return the reply, or the most blocks to lend when it depends on free memory."""
        debtor = asked.debtor_id, asked.debtor_incarnation
        for lent in self._grants.values():
            if (lent.debtor, lent.request) == (debtor, asked.request) and not lent.over:
                return BorrowReply(grant=self._grant(lent))
        if not asked.fingerprint or asked.fingerprint != self.terms.fingerprint:
            return BorrowReply(refusal=Refusal.OTHER_KV)
        cap = self.terms.most(asked.tier)
        if cap == 0 or self.frozen or asked.debtor_id == self._worker_id:
            return BorrowReply(refusal=Refusal.NOT_LENDING)
        room = min(cap - self.lent_blocks(asked.tier), asked.blocks, MOST_GRANT_BLOCKS)
        if room < max(1, asked.least_blocks):
            return BorrowReply(refusal=Refusal.AT_CAP)
        return room

    @_locked
    def lend(self, asked: BorrowBlocks, blocks: Sequence[int], now_s: float) -> BorrowReply:
        """Enter a grant of `blocks`, withdrawn from the pool. Without blocks, refuse.

        Raises ValueError for unknown or lent blocks."""
        if not blocks:
            return BorrowReply(refusal=Refusal.NOTHING_FREE)
        at, grant_of = np.array(blocks), self._grant_of[asked.tier]
        if not self._are_there(asked.tier, at) or len(set(blocks)) < len(blocks) or grant_of[at].any():
            raise ValueError(f"some {asked.tier} block of {blocks} is not this worker's, or lent already")
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
        grant_of[at] = lent.grant_id
        self._next_id += 1
        self._grants[lent.grant_id] = lent
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
            for lent in self._grants.values()
            if lent.debtor[0] == asked.debtor_id and lent.tier is KvTier.DEVICE
        )
        share = -(-short_blocks * owed // max(1, self.lent_blocks(KvTier.DEVICE)))
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
    def yielding_blocks(self) -> int:
        """Number of host blocks lent to caches."""
        return sum(len(lent.blocks) for lent in self._grants.values() if self._yields(lent))

    @_locked
    def give_way(self, blocks: int) -> list[Freed]:
        """End grants of caches, newest first, until `blocks` come back for a sequence.

        Users of an ended grant finish before its blocks are freed."""
        ended: list[Lent] = []
        for lent in reversed(self._grants.values()):
            if blocks <= 0:
                break
            if self._yields(lent) and not lent.over:
                blocks -= len(lent.blocks)
                ended.append(lent)
        return self._end(ended)

    @_locked
    def on_incarnation(self, debtor_id: str, incarnation: int) -> list[Freed]:
        """End the grants of a debtor's earlier incarnations."""
        earlier = [lent for lent in self._grants.values() if lent.debtor[0] == debtor_id and not lent.over]
        return self._end(lent for lent in earlier if lent.debtor[1] != incarnation)

    @_locked
    def enter(self, debtor: Start, grant_id: int, generation: int, now_s: float) -> int | None:
        """Return the present generation if this debtor may use its grant now: `leave` must follow.

        An earlier generation is valid for blocks that are left: a debtor learns of a new one late, and blocks
        only ever leave a grant."""
        lent = self._grants.get(grant_id)
        if lent is None or lent.over or generation > lent.generation or now_s >= lent.ends_s:
            return None
        if lent.debtor != debtor:
            return None
        lent.users += 1
        return lent.generation

    @_locked
    def leave(self, grant_id: int) -> Freed | None:
        """End an `enter`. The last user frees blocks that were returned or ended meanwhile."""
        lent = self._grants[grant_id]
        if lent.users < 1:
            raise ValueError(f"grant {grant_id} has no users")
        lent.users -= 1
        return self._part(lent, [])

    @_locked
    def grants_of(
        self, tier: KvTier, blocks: npt.NDArray[np.int32], grants: Sequence[int]
    ) -> npt.NDArray[np.int64] | None:
        """Return the grant of each block; None when one belongs to none of `grants`."""
        if not self._are_there(tier, blocks):
            return None
        found: npt.NDArray[np.int64] = self._grant_of[tier][blocks]
        is_lent = (found == grants[0]).all() if len(grants) == 1 else np.isin(found, grants).all()
        return found if is_lent else None

    @_locked
    def lent_under(self, tier: KvTier, grants: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return, by block of the tier, which of `grants` it belongs to; 0: none."""
        found = self._grant_of[tier]
        under: npt.NDArray[np.int64] = np.where(np.isin(found, grants), found, 0)
        return under

    def check_integrity(self) -> None:
        """Raise AssertionError when grants and blocks disagree, or more is lent than the cap allows."""
        expected = {tier: np.zeros_like(grant_of) for tier, grant_of in self._grant_of.items()}
        for grant_id, lent in self._grants.items():
            assert grant_id == lent.grant_id
            assert lent.blocks or lent.users, "an empty grant was kept"
            assert lent.users or not (lent.over or lent.parting), "freed blocks are held back without users"
            for blocks, number in ((lent.blocks, grant_id), (lent.parting, -grant_id)):
                assert not expected[lent.tier][list(blocks)].any(), "a block is in two grants"
                expected[lent.tier][list(blocks)] = number
        for tier, grant_of in self._grant_of.items():
            assert (grant_of == expected[tier]).all(), "a lent block belongs to no grant"
            assert np.count_nonzero(grant_of) <= self.terms.most(tier)

    def _yields(self, lent: Lent) -> bool:
        return lent.for_cache and lent.tier is KvTier.HOST

    def _of(self, debtor_id: str, incarnation: int, grant_id: int) -> Lent | None:
        lent = self._grants.get(grant_id)
        ok = lent is not None and lent.debtor == (debtor_id, incarnation) and not lent.over
        return lent if ok else None

    def _are_there(self, tier: KvTier, at: npt.NDArray[np.integer]) -> bool:
        return not len(at) or (int(at.min()) >= 0 and int(at.max()) < len(self._grant_of[tier]))

    def _end_s(self, now_s: float) -> float:
        return now_s + self.terms.lease_s + self.terms.grace_s

    def _grant(self, lent: Lent) -> Grant:
        return Grant(
            creditor_id=self._worker_id,
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
        self._grant_of[lent.tier][blocks] = -lent.grant_id
        if lent.users:
            return None
        freed, lent.parting = lent.parting, []
        self._grant_of[lent.tier][freed] = 0
        if not lent.blocks:
            del self._grants[lent.grant_id]
        return Freed(lent.tier, tuple(freed)) if freed else None
