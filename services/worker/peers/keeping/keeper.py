"""The creditor's side of cache loans: keeps whole blocks of other workers' prefix caches in lent host memory.

`kv.keep` stores a block, `kv.kept` returns it, on the threads that serve links. The creditor neither attends
to a block nor checks it: the debtor knows its checksum. Knows grants and rows of bytes.
"""

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from services.worker.kv.store import CacheableEngine
from services.worker.kv.tiers.records import Records
from services.worker.peers.attention.creditor import LentGrants
from services.worker.peers.attention.interfaces import LentBlocks
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.transport.base import Buffer, Peer, Receiver, Reception, Reply, bytes_of
from shared.errors import InvalidMessage, StaleEpoch
from shared.messages.base import decode
from shared.messages.lending import KvTier

KEEP, KEPT = "kv.keep", "kv.kept"


class LentSlot(msgspec.Struct, frozen=True, array_like=True):
    """Header of both messages: one block of the creditor's host memory, and its grant."""

    grant_id: int
    generation: int
    block: int


class Keeper:
    """Host memory that one worker lends, as rows of `records`. `receivers` are for its bulk desk."""

    def __init__(self, records: Records, grants: LentGrants) -> None:
        self._records = records
        self._grants = grants
        self.copying = threading.Lock()
        """Held while a thread uses the records."""
        self.receivers: dict[str, Receiver] = {KEEP: self._keep, KEPT: self._kept}

    def _keep(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        """Admit a block. The slot keeps its old content until all bytes have arrived."""
        expected = self._records.record_bytes
        if list(sizes_bytes) != [expected]:
            raise InvalidMessage(f"buffers of {list(sizes_bytes)} bytes where a block has {expected}")
        row = np.empty(expected, dtype=np.uint8)

        def keep(block: int) -> Reply:
            self._records.write([row], [block])
            return Reply()

        return self._admit(peer, header, keep, [bytes_of(row)])

    def _kept(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        """Admit a request. The reply is a copy, so that the grant may end while it is sent."""
        if sizes_bytes:
            raise InvalidMessage("a request for a block carries no buffers")

        def kept(block: int) -> Reply:
            row = np.empty(self._records.record_bytes, dtype=np.uint8)
            self._records.read([block], [row])
            return Reply(b"", [bytes_of(row)])

        return self._admit(peer, header, kept)

    def _admit(
        self, peer: Peer, header: bytes, work: Callable[[int], Reply], buffers: Sequence[Buffer] = ()
    ) -> Reception:
        """Reserve the slot until the message is processed. Raises StaleEpoch for others than its debtor."""
        slot = decode(header, LentSlot)
        if not 0 <= slot.block < 1 << 31:
            raise InvalidMessage(f"no block has the number {slot.block}")
        refs = [GrantRef(slot.grant_id, slot.generation)]
        entered = self._grants.enter(peer, refs)
        blocks = np.array([slot.block], dtype=np.int32)
        if entered is None or self._grants.loans(entered, KvTier.HOST, blocks) is None:
            if entered is not None:
                self._grants.leave(refs)
            raise StaleEpoch("the grant was revoked, has expired or was never yours: borrow again")

        def commit() -> Reply:
            try:
                with self.copying:
                    return work(slot.block)
            finally:
                self._grants.leave(refs)

        return Reception(commit, lambda: self._grants.leave(refs), buffers)


def lent_records(engine: CacheableEngine, blocks: int, host: LentBlocks | None) -> Records:
    """Return `blocks` of lent host memory as rows of bytes: `host` where attention works on it, else new
    memory that is only written and read."""
    if host is not None:
        return Records(host.pools)
    return Records([(np.zeros((blocks, engine.records().record_bytes), dtype=np.uint8),)])
