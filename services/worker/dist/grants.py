"""What a creditor lets a debtor touch. Knows no bus: granting is the lending table's business."""

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.bulk.base import Peer
from services.worker.dist.messages import GrantRef
from shared.messages.lending import KvTier


class Grants(Protocol):
    """Asked on the threads that serve links, for every message."""

    def enter(self, debtor: Peer, grants: Sequence[GrantRef]) -> tuple[GrantRef, ...] | None:
        """Their generations now, where each is this debtor's and lasts: then none of their blocks is given to
        anybody else until `leave`, which must follow. None where one is not."""
        ...

    def leave(self, debtor: Peer, grants: Sequence[GrantRef]) -> None:
        """After an `enter` that said yes."""
        ...

    def covers(
        self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> bool:
        """Whether each of the tier's blocks belongs to one of these grants (which were entered) still. While
        their generations stay the same, so does the answer."""
        ...


class GrantBook:
    """Grants kept in a table, for a creditor that nobody leads: used from any thread."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[KvTier, frozenset[int]]] = {}
        self._generations: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def grant(
        self, debtor_id: str, ref: GrantRef, blocks: Iterable[int], tier: KvTier = KvTier.DEVICE
    ) -> None:
        with self._lock:
            self._held[(debtor_id, ref.grant_id)] = tier, frozenset(blocks)
            self._generations[(debtor_id, ref.grant_id)] = ref.generation

    def enter(self, debtor: Peer, grants: Sequence[GrantRef]) -> tuple[GrantRef, ...] | None:
        with self._lock:
            named = {(debtor.worker_id, ref.grant_id): ref.generation for ref in grants}
            is_current = all(self._generations.get(key) == generation for key, generation in named.items())
        return tuple(grants) if is_current else None

    def leave(self, debtor: Peer, grants: Sequence[GrantRef]) -> None:
        return

    def covers(
        self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> bool:
        allowed: set[int] = set()
        with self._lock:
            for ref in grants:
                at, held = self._held.get((debtor.worker_id, ref.grant_id), (tier, frozenset[int]()))
                allowed |= held if at is tier else frozenset()
        return allowed.issuperset(blocks.tolist())
