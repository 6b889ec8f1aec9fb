"""The lending table as the threads that serve links see it: who may touch which blocks now.

Grants are given and ended on the event loop; a lock keeps both sides apart. What was found to be lent under
some generations of grants need not be looked up again while these are the present ones.
Source: `algorithms.md` §4 (fencing).
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.transport.base import Peer
from shared.clock import Clock, monotonic_s
from shared.messages.lending import (
    BlocksReturned,
    BorrowBlocks,
    BorrowReply,
    KvTier,
    LeasesRenewed,
    RenewLeases,
    ReturnBlocks,
)


class SharedGrants(Grants):
    """`Grants`, used from several threads."""

    def __init__(self, table: RBlockTable, incarnation: int, terms: Terms) -> None:
        super().__init__(table, incarnation, terms)
        self.lock = threading.RLock()

    def generation(self, grant_id: int) -> int | None:
        with self.lock:
            return super().generation(grant_id)

    def answer(self, asked: BorrowBlocks) -> BorrowReply | int:
        with self.lock:
            return super().answer(asked)

    def lend(self, asked: BorrowBlocks, blocks: Sequence[int], now_s: float) -> BorrowReply:
        with self.lock:
            return super().lend(asked, blocks, now_s)

    def debtors(self) -> set[str]:
        with self.lock:
            return super().debtors()

    def renew(self, asked: RenewLeases, now_s: float, *, short_blocks: int = 0) -> LeasesRenewed:
        with self.lock:
            return super().renew(asked, now_s, short_blocks=short_blocks)

    def give_back(self, asked: ReturnBlocks) -> tuple[BlocksReturned, Freed | None]:
        with self.lock:
            return super().give_back(asked)

    def tick(self, now_s: float) -> list[Freed]:
        with self.lock:
            return super().tick(now_s)

    def on_incarnation(self, debtor_id: str, incarnation: int) -> list[Freed]:
        with self.lock:
            return super().on_incarnation(debtor_id, incarnation)

    def enter(self, grant_id: int, generation: int, blocks: Iterable[int], now_s: float) -> bool:
        with self.lock:
            return super().enter(grant_id, generation, blocks, now_s)

    def leave(self, grant_id: int) -> Freed | None:
        with self.lock:
            return super().leave(grant_id)

    def generation_for(self, debtor: Peer, grant_id: int) -> int | None:
        """The grant's now, if it is this life of this debtor's."""
        with self.lock:
            lent = self._of(debtor.worker_id, debtor.incarnation, grant_id)
            return None if lent is None else lent.generation


class LentGrants:
    """`grants.Grants` over the lending table. `on_freed` is called on a link's thread."""

    def __init__(
        self,
        grants: SharedGrants,
        table: RBlockTable,
        on_freed: Callable[[Freed], None],
        clock: Clock = monotonic_s,
    ) -> None:
        self._grants = grants
        self._table = table
        self._on_freed = on_freed
        self._clock = clock

    def enter(self, debtor: Peer, grants: Sequence[GrantRef]) -> tuple[GrantRef, ...] | None:
        entered: list[GrantRef] = []
        with self._grants.lock:
            for ref in grants:
                generation = self._grants.generation_for(debtor, ref.grant_id)
                if generation is None or not self._grants.enter(
                    ref.grant_id, ref.generation, (), self._clock()
                ):
                    break
                entered.append(GrantRef(ref.grant_id, generation))
        if len(entered) < len(grants):
            self.leave(debtor, entered)
            return None
        return tuple(entered)

    def leave(self, debtor: Peer, grants: Sequence[GrantRef]) -> None:
        for ref in grants:
            freed = self._grants.leave(ref.grant_id)
            if freed is not None:
                self._on_freed(freed)

    def covers(
        self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> bool:
        with self._grants.lock:
            return self._table.are_lent(tier, blocks, [ref.grant_id for ref in grants])
