"""The giving side of migration: sends blocks that another worker names, with their checksums.

`kv.blocks` names blocks and returns them, one buffer each, up to the first missing one. It runs on the
threads that serve links, beside the engine's steps: a named block is complete and immutable, and is held
while it is read. Borrowed blocks are first fetched from their creditor, a few at a time, between two steps.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.store import KvStore
from services.worker.kv.tiers.records import Records
from services.worker.kv.transfers import Route
from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.transport.base import Peer, Receiver, Reception, Reply, bytes_of
from shared.blocks import HASH_BYTES, BlockHash
from shared.clock import monotonic_s
from shared.errors import InvalidMessage, ModelMismatch
from shared.messages.base import decode

BLOCKS = "kv.blocks"
MOST_BLOCKS = 256
"""Most blocks of one message."""
_MOST_BORROWED = 8
"""Most borrowed blocks of one answer: the next step waits for them."""
_HOLD_S = 5.0
"""Deadline for the engine's thread to find the blocks."""


class WantedBlocks(msgspec.Struct, frozen=True):
    """Header of `kv.blocks`: consecutive blocks of one sequence."""

    fingerprint: bytes
    names: tuple[BlockHash, ...]
    is_shadow: bool = False
    """No request waits for them: they are copied last, and hold up no step."""


class GivenBlocks(msgspec.Struct, frozen=True):
    """Header of the answer to `kv.blocks`."""

    checksums: tuple[int, ...]
    """Checksum of each block sent, over its bytes, name and fingerprint (`Checksums`)."""
    sums: int = 0
    """Kind of checksum. A target that computes another kind cannot compare them."""
    waited_s: float = 0.0
    """Time before the blocks were read, while the link was idle: steps and other copies went first."""


class BlockSource:
    """Gives blocks of one worker. `receivers` are for its bulk desk.

    `records` are read on the transfer engine's threads only. `borrower` None: the worker borrows nothing."""

    def __init__(
        self, door: Door, store: KvStore, records: Records, borrower: Borrower | None = None
    ) -> None:
        self._door = door
        self._store = store
        self._records = {Route.GIVE: records, Route.SHADOW: records.twin()}
        self._borrower = borrower
        self.fingerprint = store.fingerprint
        self.given_blocks = 0
        self.shadowed_blocks = 0
        """Number of these given as shadows."""
        self.receivers: dict[str, Receiver] = {BLOCKS: self._give}

    def _give(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        wanted = decode(header, WantedBlocks)
        if not 0 < len(wanted.names) <= MOST_BLOCKS or any(len(name) != HASH_BYTES for name in wanted.names):
            raise InvalidMessage(f"a request names 1 to {MOST_BLOCKS} blocks, by {HASH_BYTES} bytes each")
        if sizes_bytes:
            raise InvalidMessage("a request for blocks carries no buffers")
        if wanted.fingerprint != self.fingerprint:
            raise ModelMismatch(f"{peer.worker_id} has KV of another model, layout or dtype")
        return Reception(lambda: self._reply(wanted))

    def _reply(self, wanted: WantedBlocks) -> Reply:
        """Reply with copies: the blocks may be evicted while they are sent."""
        asked_s = monotonic_s()
        rows, began_s = self._read_own(wanted)
        if wanted.is_shadow:
            self.shadowed_blocks += len(rows)
        else:
            borrowed = self._read_borrowed(wanted.names[len(rows) :][:_MOST_BORROWED], rows.shape[1])
            rows = np.concatenate([rows, borrowed]) if len(borrowed) else rows
        self.given_blocks += len(rows)
        sums, named = self._store.sums, zip(rows, wanted.names, strict=False)
        made = tuple(sums.of(row, name, wanted.fingerprint) for row, name in named)
        given = GivenBlocks(made, sums.kind, waited_s=began_s - asked_s)
        return Reply(msgspec.msgpack.encode(given), [bytes_of(row) for row in rows])

    def _read_own(self, wanted: WantedBlocks) -> tuple[npt.NDArray[np.uint8], float]:
        """Return the device blocks that are here, `[n, record_bytes]`, and when their copy began."""
        cache = self._store.cache
        blocks = self._door.take_within(
            lambda core, _: cache.hold(wanted.names), cache.release, timeout_s=_HOLD_S
        )
        route = Route.SHADOW if wanted.is_shadow else Route.GIVE
        records = self._records[route]
        rows = np.empty((len(blocks), records.record_bytes), dtype=np.uint8)
        began_s = monotonic_s()

        def copy() -> bool:
            nonlocal began_s
            began_s = monotonic_s()
            records.read(blocks, list(rows))
            return True

        try:
            run = self._store.transfers.run
            is_read = run(route, copy, failed=False, size_bytes=rows.nbytes, within_s=_HOLD_S)
        finally:
            if blocks:
                self._door.give(lambda core, _: cache.release(blocks))
        return (rows if is_read else rows[:0]), began_s

    def _read_borrowed(self, names: Sequence[BlockHash], record_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the bytes `[n, record_bytes]` of the leading blocks that creditors hold."""
        rows = np.empty((len(names), record_bytes), dtype=np.uint8)
        borrower = self._borrower
        if borrower is None or not names:
            return rows[:0]

        def read(core: StepCore, now_s: float) -> int:
            blocks = self._store.cache.borrowed(names)
            return borrower.read(core, now_s, blocks, rows) if blocks else 0

        return rows[: self._door.take_within(read, lambda count: None, timeout_s=_HOLD_S)]
