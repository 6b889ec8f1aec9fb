"""The creditor's side of cache loans: keeps whole blocks of other workers' prefix caches in lent host memory.

`kv.keep` stores a block, `kv.kept` returns it, on the threads that serve links. The creditor neither attends
to a block nor checks it: the debtor knows its checksum. Knows grants and rows of bytes.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.kv.store import CacheableEngine
from services.worker.kv.tiers.records import Records
from services.worker.peers.attention.assembly import host_blocks
from services.worker.peers.attention.creditor import AccessGrants
from services.worker.peers.attention.interfaces import LentBlocks
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.transport.base import Buffer, Peer, Receiver, Reply, bytes_of
from shared.errors import InvalidMessage, StaleEpoch
from shared.messages.base import decode
from shared.messages.lending import KvTier

KEEP, KEPT = "kv.keep", "kv.kept"


class LentSlot(msgspec.Struct, frozen=True, array_like=True):
    """Header of both messages: one block of the creditor's host memory, and its grant."""

    grant_id: int
    generation: int
    block: int

    @property
    def grant(self) -> GrantRef:
        return GrantRef(self.grant_id, self.generation)


class Keeper:
    """Host memory that one worker lends, as rows of `records`. `receivers` are for its bulk desk."""

    def __init__(self, records: Records, grants: AccessGrants) -> None:
        self.records = records
        self.grants = grants
        self.copying = threading.Lock()
        """Held while a thread uses `records`."""
        self.receivers: dict[str, Receiver] = {KEEP: self._keep, KEPT: self._kept}

    def enter(self, peer: Peer, header: bytes) -> LentSlot:
        """Return the slot, reserved until `leave`. Raises StaleEpoch when the debtor does not hold it."""
        slot = decode(header, LentSlot)
        if not 0 <= slot.block < 1 << 31:
            raise InvalidMessage(f"no block has the number {slot.block}")
        entered = self.grants.enter(peer, [slot.grant])
        if entered is not None:
            blocks = np.array([slot.block], dtype=np.int32)
            if self.grants.loans(peer, entered, KvTier.HOST, blocks) is not None:
                return slot
            self.leave(peer, slot)
        raise StaleEpoch("the grant was revoked, has expired or was never yours: borrow again")

    def leave(self, peer: Peer, slot: LentSlot) -> None:
        self.grants.leave(peer, [slot.grant])

    def _keep(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Arriving":
        expected = self.records.record_bytes
        if list(sizes_bytes) != [expected]:
            raise InvalidMessage(f"buffers of {list(sizes_bytes)} bytes where a block has {expected}")
        slot = self.enter(peer, header)
        return _Arriving(self, peer, slot, np.empty(expected, dtype=np.uint8))

    def _kept(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Leaving":
        if sizes_bytes:
            raise InvalidMessage("a request for a block carries no buffers")
        return _Leaving(self, peer, self.enter(peer, header))


@dataclass(slots=True)
class _Arriving:
    """A block on its way in. The slot keeps its old content until all bytes have arrived."""

    keeper: Keeper
    peer: Peer
    slot: LentSlot
    row: npt.NDArray[np.uint8]

    @property
    def buffers(self) -> Sequence[Buffer]:
        return [bytes_of(self.row)]

    def commit(self) -> Reply:
        try:
            with self.keeper.copying:
                self.keeper.records.write([self.row], [self.slot.block])
            return Reply()
        finally:
            self.keeper.leave(self.peer, self.slot)

    def abandon(self) -> None:
        self.keeper.leave(self.peer, self.slot)


@dataclass(slots=True)
class _Leaving:
    """A block on its way out."""

    keeper: Keeper
    peer: Peer
    slot: LentSlot
    buffers: Sequence[Buffer] = ()

    def commit(self) -> Reply:
        """Reply with a copy, so that the grant may end while it is sent."""
        try:
            row = np.empty(self.keeper.records.record_bytes, dtype=np.uint8)
            with self.keeper.copying:
                self.keeper.records.read([self.slot.block], [row])
            return Reply(b"", [bytes_of(row)])
        finally:
            self.keeper.leave(self.peer, self.slot)

    def abandon(self) -> None:
        self.keeper.leave(self.peer, self.slot)


def lent_records(
    config: LendingConfig, engine: CacheableEngine, host: LentBlocks | None
) -> tuple[Records, int] | None:
    """Return the lent host memory as rows of bytes, and its number of blocks; None where none is lent.

    It is `host` where attention works on it, else new memory that is only written and read. Raises
    ConfigError where the settings grant less than a block."""
    if host is not None:
        return Records(host.pools), host.blocks
    blocks = host_blocks(config, engine.pools) if config.lend else 0
    if not blocks:
        return None
    rows = np.zeros((blocks, engine.records().record_bytes), dtype=np.uint8)
    return Records([(rows,)]), blocks
