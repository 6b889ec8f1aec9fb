"""The creditor's side: whole blocks of other workers' prefix caches, kept in the host memory that it lends.

`kv.keep` brings a block, `kv.kept` takes it back. Runs on the threads that serve links. Nothing is attended
to, or looked into: who sent a block knows its checksum. Knows grants and rows of bytes.
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
    """Header of both: one block of the creditor's host memory, and the grant that it is lent under."""

    grant_id: int
    generation: int
    block: int

    @property
    def grant(self) -> GrantRef:
        return GrantRef(self.grant_id, self.generation)


class Keeper:
    """One worker's lent host memory, as `records` of it. `receivers` are for its bulk desk."""

    def __init__(self, records: Records, grants: AccessGrants) -> None:
        self.records = records
        self.grants = grants
        self.copying = threading.Lock()
        """`records` are for one thread at a time."""
        self.receivers: dict[str, Receiver] = {KEEP: _Keeping(self), KEPT: _Kept(self)}

    def enter(self, peer: Peer, header: bytes) -> LentSlot:
        """The slot, which is the debtor's until `leave`. Raises StaleEpoch where it is not."""
        slot = decode(header, LentSlot)
        if not 0 <= slot.block < 1 << 31:
            raise InvalidMessage(f"no block has the number {slot.block}")
        entered = self.grants.enter(peer, [slot.grant])
        if entered is not None:
            blocks = np.array([slot.block], dtype=np.int32)
            if self.grants.loans(peer, entered, KvTier.HOST, blocks) is not None:
                return slot
            self.leave(peer, slot)
        raise StaleEpoch("the grant was revoked, has expired or was never yours: borrow anew")

    def leave(self, peer: Peer, slot: LentSlot) -> None:
        self.grants.leave(peer, [slot.grant])


@dataclass(frozen=True, slots=True)
class _Keeping:
    """`kv.keep`."""

    keeper: Keeper

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Arriving":
        expected = self.keeper.records.record_bytes
        if list(sizes_bytes) != [expected]:
            raise InvalidMessage(f"buffers of {list(sizes_bytes)} bytes where a block has {expected}")
        slot = self.keeper.enter(peer, header)
        return _Arriving(self.keeper, peer, slot, np.empty(expected, dtype=np.uint8))


@dataclass(slots=True)
class _Arriving:
    """A block on its way in: what is kept stays as it was until all of it is there."""

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


@dataclass(frozen=True, slots=True)
class _Kept:
    """`kv.kept`."""

    keeper: Keeper

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Leaving":
        if sizes_bytes:
            raise InvalidMessage("who asks for a block brings none")
        return _Leaving(self.keeper, peer, self.keeper.enter(peer, header))


@dataclass(slots=True)
class _Leaving:
    """A block that is asked for."""

    keeper: Keeper
    peer: Peer
    slot: LentSlot
    buffers: Sequence[Buffer] = ()

    def commit(self) -> Reply:
        """Copied: what is sent is of one moment, whatever happens to the grant meanwhile."""
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
    """What is lent of host memory, as rows of bytes, and how many blocks that are: `host` itself where
    attention works on it, else memory that is only written to and read. None where none is lent. Raises
    ConfigError where the settings grant less than a block."""
    if host is not None:
        return Records(host.pools), host.blocks
    blocks = host_blocks(config, engine.pools) if config.lend else 0
    if not blocks:
        return None
    rows = np.zeros((blocks, engine.records().record_bytes), dtype=np.uint8)  # touched when first written
    return Records([(rows,)]), blocks
