"""The giving side: reads blocks that another worker names, and sends them with their checksums.

Runs on the threads that serve links, beside the engine's steps: a named block is whole and never written
again, and it is held while it is read. Nothing is taken from the sequence whose blocks they are.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from services.worker.kv.tiers.records import Records, checksum
from services.worker.peers.migration.ledge import Ledge
from services.worker.peers.migration.messages import (
    BLOCKS,
    PROBE,
    Given,
    Wanted,
    read_probe,
    read_wanted,
)
from services.worker.peers.transport.base import Buffer, Peer, Receiver, Reply
from services.worker.peers.transport.buffers import bytes_of
from shared.errors import InvalidMessage, ModelMismatch

_HOLD_S = 5.0
"""The engine's thread finds the blocks within so long."""


class BlockSource:
    """One worker's. `receivers` are for its bulk desk."""

    def __init__(self, ledge: Ledge, records: Records, fingerprint: bytes) -> None:
        self.ledge = ledge
        self.records = records
        self.fingerprint = fingerprint
        self.reading = threading.Lock()
        self.given_blocks = 0
        self.receivers: dict[str, Receiver] = {BLOCKS: _Blocks(self), PROBE: _Probes()}


@dataclass(frozen=True, slots=True)
class _Blocks:
    source: BlockSource

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Giving":
        wanted = read_wanted(header)
        if sizes_bytes:
            raise InvalidMessage("who asks for blocks brings none")
        if wanted.fingerprint != self.source.fingerprint:
            raise ModelMismatch(f"{peer.worker_id} has KV of another model, layout or dtype")
        return _Giving(self.source, wanted)


@dataclass(slots=True)
class _Giving:
    """One question."""

    source: BlockSource
    wanted: Wanted
    buffers: Sequence[Buffer] = field(default=())

    def commit(self) -> Reply:
        """Copied: what is sent is whole whatever becomes of the blocks meanwhile."""
        blocks = self.source.ledge.hold(self.wanted.names, _HOLD_S)
        try:
            rows = np.empty((len(blocks), self.source.records.record_bytes), dtype=np.uint8)
            with self.source.reading:
                self.source.records.read(blocks, list(rows))
                self.source.given_blocks += len(blocks)
        finally:
            self.source.ledge.let_go(blocks)
        named = zip(rows, self.wanted.names, strict=False)
        given = Given(tuple(checksum(row, name, self.wanted.fingerprint) for row, name in named))
        return Reply(msgspec.msgpack.encode(given), [bytes_of(row) for row in rows])

    def abandon(self) -> None:
        """Nothing is held yet."""


@dataclass(frozen=True, slots=True)
class _Probes:
    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Echo":
        if sizes_bytes:
            raise InvalidMessage("a probe brings nothing")
        return _Echo(read_probe(header).size_bytes)


@dataclass(slots=True)
class _Echo:
    size_bytes: int
    buffers: Sequence[Buffer] = field(default=())

    def commit(self) -> Reply:
        return Reply(b"", [bytes_of(np.zeros(self.size_bytes, dtype=np.uint8))])

    def abandon(self) -> None:
        """Nothing is held."""
