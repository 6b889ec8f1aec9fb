"""The giving side of migration: sends blocks that another worker names, with their checksums.

`kv.blocks` names blocks and returns them, one buffer each, up to the first missing one. It runs on the
threads that serve links, beside the engine's steps: a named block is complete and immutable, and is held
while it is read. Borrowed blocks are first fetched from their creditor, a few at a time, between two steps.
The sequence keeps its blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.kv.tiers.checksums import CRC, Checksums
from services.worker.kv.tiers.records import Records
from services.worker.kv.transfers import Route, TransferEngine
from services.worker.peers.engine_calls import CacheDoor
from services.worker.peers.transport.base import Buffer, Peer, Receiver, Reply, bytes_of
from shared.blocks import HASH_BYTES, BlockHash
from shared.clock import monotonic_s
from shared.errors import InvalidMessage, ModelMismatch
from shared.messages.base import decode

BLOCKS = "kv.blocks"
MOST_BLOCKS = 256
"""Most blocks of one message."""


class WantedBlocks(msgspec.Struct, frozen=True):
    """Header of `kv.blocks`: consecutive blocks of one sequence."""

    fingerprint: bytes
    names: tuple[BlockHash, ...]
    is_shadow: bool = False
    """No request waits for them: they are copied last, and hold up no step."""


class GivenBlocks(msgspec.Struct, frozen=True):
    """Header of the answer to `kv.blocks`."""

    checksums: tuple[int, ...]
    """Of each block sent, over its bytes, name and fingerprint (`kv.tiers.checksums`)."""
    sums: int = 0
    """Kind of checksum. A target that computes another kind cannot compare them."""
    waited_s: float = 0.0
    """Time before the blocks were read, while the link was idle: steps and other copies went first."""


def read_wanted(header: bytes) -> WantedBlocks:
    """Decode a request. Raises InvalidMessage."""
    wanted = decode(header, WantedBlocks)
    if not 0 < len(wanted.names) <= MOST_BLOCKS or any(len(name) != HASH_BYTES for name in wanted.names):
        raise InvalidMessage(f"a request names 1 to {MOST_BLOCKS} blocks, by {HASH_BYTES} bytes each")
    return wanted


def read_given(header: bytes) -> GivenBlocks:
    """Decode an answer. Raises InvalidMessage."""
    return decode(header, GivenBlocks)


_MOST_BORROWED = 8
"""Most borrowed blocks of one answer: the next step waits for them."""
_HOLD_S = 5.0
"""Deadline for the engine's thread to find the blocks."""


class BlockSource:
    """Gives blocks of one worker. `receivers` are for its bulk desk."""

    def __init__(
        self,
        cache: CacheDoor,
        transfers: TransferEngine,
        records: Records,
        fingerprint: bytes,
        sums: Checksums = CRC,
    ) -> None:
        """`records`: only `transfers` reads them."""
        self.cache = cache
        self.transfers = transfers
        self.sums = sums
        self.records = records
        self.shadow_records = records.twin()
        """For the thread that copies shadows."""
        self.fingerprint = fingerprint
        self.given_blocks = 0
        self.shadowed_blocks = 0
        """Number of these given as shadows."""
        self.receivers: dict[str, Receiver] = {BLOCKS: self._give}

    def _give(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Giving":
        wanted = read_wanted(header)
        if sizes_bytes:
            raise InvalidMessage("a request for blocks carries no buffers")
        if wanted.fingerprint != self.fingerprint:
            raise ModelMismatch(f"{peer.worker_id} has KV of another model, layout or dtype")
        return _Giving(self, wanted)


@dataclass(slots=True)
class _Giving:
    """One request under way."""

    source: BlockSource
    wanted: WantedBlocks
    buffers: Sequence[Buffer] = field(default=())

    def commit(self) -> Reply:
        """Reply with copies: the blocks may be evicted while they are sent."""
        asked_s = monotonic_s()
        own, began_s = self._read_own()
        away = self.wanted.names[len(own) :][:_MOST_BORROWED]
        if self.wanted.is_shadow:
            away = ()
            self.source.shadowed_blocks += len(own)
        borrowed = self.source.cache.read_borrowed(away, self.source.records.record_bytes, _HOLD_S)
        rows = np.concatenate([own, borrowed]) if len(borrowed) else own
        self.source.given_blocks += len(rows)
        named = zip(rows, self.wanted.names, strict=False)
        sums = self.source.sums
        made = tuple(sums.of(row, name, self.wanted.fingerprint) for row, name in named)
        given = GivenBlocks(made, sums.kind, waited_s=began_s - asked_s)
        return Reply(msgspec.msgpack.encode(given), [bytes_of(row) for row in rows])

    def _read_own(self) -> tuple[npt.NDArray[np.uint8], float]:
        """Return the device blocks that are here, and when their copy began."""
        blocks = self.source.cache.hold(self.wanted.names, _HOLD_S)
        try:
            return self._copied(blocks)
        finally:
            self.source.cache.let_go(blocks)

    def _copied(self, blocks: Sequence[int]) -> tuple[npt.NDArray[np.uint8], float]:
        is_shadow = self.wanted.is_shadow
        records = self.source.shadow_records if is_shadow else self.source.records
        route = Route.SHADOW if is_shadow else Route.GIVE
        rows = np.empty((len(blocks), records.record_bytes), dtype=np.uint8)
        began_s = monotonic_s()

        def copy() -> bool:
            nonlocal began_s
            began_s = monotonic_s()
            records.read(blocks, list(rows))
            return True

        transfers = self.source.transfers
        is_read = transfers.run(route, copy, failed=False, size_bytes=rows.nbytes, within_s=_HOLD_S)
        return (rows if is_read else rows[:0]), began_s

    def abandon(self) -> None:
        """Nothing to release."""
