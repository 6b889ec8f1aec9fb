"""Places where KV is stored or sent, each with a corruption: is it detected before use?

Each place is the worker's own part with real memory, files and sockets. `caught` writes valid bytes, corrupts
them, reads them as a worker does, and returns whether the read was refused.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np
import torch

from bench.micro.audit.corruption import corrupt
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.native.sums import checksums
from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import Span, pack
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import Load, Store, StoredBlock
from services.worker.kv.tiers.copier import TierMover
from services.worker.kv.tiers.disk import open_disk
from services.worker.kv.tiers.host import HostTier
from services.worker.kv.tiers.records import records_of
from services.worker.kv.tiers.slotfile import Geometry
from services.worker.kv.transfers import TransferEngine
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.memory import device_memory
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    GrantRef,
    Request,
    request_encoder,
    to_wire,
)
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.transport.base import Peer, Reception, Reply, bytes_of
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.tcp import TcpTransport, split_address
from shared.errors import CorruptedKv, InternalError, KvasirError
from shared.messages.lending import BorrowBlocks, KvTier

BLOCK_TOKENS = 16
_FINGERPRINT = b"0123456789abcdef"
_EVER_S = 1e9
_DEADLINE_S = 0.3
_PIPE_BYTES = 1 << 16


class Place(Protocol):
    """One place to corrupt."""

    def caught(self, rng: Random) -> bool: ...

    def close(self) -> None: ...


class Tiers:
    """A record in a host slot, or in the disk's file."""

    def __init__(self, attention: PagedAttention, tier: Tier, folder: Path) -> None:
        self._tier = tier
        records = records_of(attention.pools)
        self._pools = [bytes_of(pool) for pools in attention.pools for pool in pools]
        geometry = Geometry(_FINGERPRINT, records.record_bytes, 1)
        self._disk = open_disk(folder / "audit.kv", geometry, checksums())
        if self._disk is None:
            raise InternalError(f"no disk tier in {folder}: see the log")
        self._geometry = geometry
        self._file = (folder / "audit.kv").open("r+b", buffering=0)
        self._host = HostTier(1, records.record_bytes, _FINGERPRINT, checksums())
        self._transfers = TransferEngine(lambda: None)
        self._mover = TierMover(self._transfers, records, self._host, self._disk, lambda _: None)
        self._name = b"n" * 16

    def caught(self, rng: Random) -> bool:
        """Store a block, corrupt it and load it back."""
        self._mover.store([Store(self._name, 0, 0)])
        row = self._host.row(0)
        if self._tier is Tier.HOST:
            corrupt(row, rng)
        else:
            assert self._disk is not None
            node = StoredBlock(self._name, b"", 0, 0)
            assert self._disk.write(node, row, self._host.checksum_of(0))
            self._spoil_file(rng)
        loaded = self._mover.load([Load(self._name, self._tier, 0, 0)], _EVER_S)
        return loaded.failed and not loaded.done

    def _spoil_file(self, rng: Random) -> None:
        self._file.seek(self._geometry.record_at(0))
        spoilt = np.frombuffer(bytearray(self._file.read(self._geometry.record_bytes)), dtype=np.uint8)
        corrupt(spoilt, rng)
        self._file.seek(self._geometry.record_at(0))
        self._file.write(spoilt.tobytes())

    def close(self) -> None:
        self._file.close()
        self._transfers.halt(10.0)
        self._mover.close()


class Lent:
    """A block that a creditor lends, attended to or fetched."""

    def __init__(self, attention: PagedAttention, q_heads: int) -> None:
        self._attention = attention
        blocks = len(attention.pools[0][0])
        table = RBlockTable("creditor", blocks)
        grants = Grants(table, 1, Terms(blocks, lease_s=_EVER_S), threading.RLock())
        asked = BorrowBlocks(debtor_id="debtor", debtor_incarnation=1, request=1, blocks=blocks)
        grants.lend(asked, range(blocks), 0.0)
        lent = LentGrants(grants, table, lambda freed: None)
        self._creditor = Creditor(
            device_memory(attention), lent, ComputeBudget(1.0), block_tokens=BLOCK_TOKENS
        )
        self._q_heads = q_heads
        self._steps = 0
        self._tokens = (blocks - 1) * BLOCK_TOKENS
        self._ask(ATTEND, self._part(0, self._tokens), range(len(attention.pools)), self._noise(self._tokens))

    def caught(self, rng: Random) -> bool:
        """Corrupt keys or values of one block in one layer, and restore them afterwards."""
        layer = rng.randrange(len(self._attention.pools))
        pool = self._attention.pools[layer][rng.randrange(2)]
        memory = np.frombuffer(bytes_of(pool[rng.randrange(self._tokens // BLOCK_TOKENS)]), dtype=np.uint8)
        before = memory.copy()
        corrupt(memory, rng)
        kind = rng.choice((ATTEND, FETCH))
        try:
            self._ask(kind, self._part(self._tokens, 1), [layer], self._noise(1) if kind == ATTEND else [])
        except CorruptedKv:
            return True
        finally:
            memory[:] = before
        return False

    def _part(self, first: int, count: int) -> Request:
        homes = Homes(1)
        blocks = len(self._attention.pools[0][0])
        homes.place(range(1, blocks + 1), 1, range(blocks))
        part = split(pack([Span(first, count, range(1, blocks + 1))], BLOCK_TOKENS), homes, BLOCK_TOKENS)[1]
        self._steps += 1
        return Request(
            step=self._steps,
            layer=0,
            grants=(GrantRef(1, 1),),
            part=to_wire(part.spans),
            tier=KvTier.DEVICE,
            indices=np.arange(self._tokens // BLOCK_TOKENS, dtype=np.int32).tobytes(),
        )

    def _noise(self, rows: int) -> list[torch.Tensor]:
        (key, value), *_ = self._attention.pools
        shapes = ((self._q_heads, key.shape[2]), (key.shape[1], key.shape[2]), (key.shape[1], value.shape[3]))
        return [torch.randn(rows, *shape) for shape in shapes]

    def _ask(
        self, kind: str, request: Request, layers: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Ask the creditor as a link's thread does. Raises KvasirError."""
        from msgspec.structs import replace

        for layer in layers:
            asked = replace(request, layer=layer, q_heads=self._q_heads if kind == ATTEND else 0)
            buffers = [bytes_of(tensor) for tensor in tensors]
            receiver, header = self._creditor.receivers[kind], request_encoder.encode(asked)
            reception = receiver(Peer("debtor", 1), header, [each.nbytes for each in buffers])
            for into, given in zip(reception.buffers, buffers, strict=True):
                into[:] = given
            reception.commit()

    def close(self) -> None:
        """Close nothing."""


class _Echo:
    """A receiver that returns its messages and keeps the committed ones."""

    def __init__(self) -> None:
        self.committed: list[bytes] = []

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        return _Echoed(self, [memoryview(bytearray(size)) for size in sizes_bytes])


class _Echoed:
    def __init__(self, echo: _Echo, buffers: list[memoryview]) -> None:
        self._echo, self.buffers = echo, buffers

    def commit(self) -> Reply:
        self._echo.committed.append(b"".join(self.buffers))
        return Reply(b"", self.buffers)

    def abandon(self) -> None:
        """Keep nothing."""


class Frames:
    """Payloads between two workers by TCP, through a proxy that corrupts bytes."""

    def __init__(self) -> None:
        self._desk = WorkerDesk(Peer("creditor", 1))
        self._echo = _Echo()
        self._desk.serve("echo", self._echo.admit)
        self._listener = TcpTransport().listen(self._desk)
        self._spoil: Callable[[bytearray, bool], None] | None = None
        self._middle = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def caught(self, rng: Random) -> bool:
        """Send a question, and corrupt its payload or that of its answer."""
        self._spoil = None
        self._echo.committed.clear()
        own = Peer("debtor", 1)
        ticket = self._desk.issue(own, valid_for_s=5.0)
        address = f"127.0.0.1:{self._middle.getsockname()[1]}"
        link = TcpTransport().dial(address, own, self._desk.own, ticket, deadline_s=5.0)
        sent = rng.randbytes(int(2 ** rng.uniform(8, 19)))
        into = bytearray(len(sent))
        begins_with, is_answer = sent[:16], rng.random() < 0.5
        is_spoilt = threading.Event()

        def spoil(piece: bytearray, is_coming: bool) -> None:
            at = piece.find(begins_with)
            if is_coming is is_answer and at >= 0 and not is_spoilt.is_set():
                end = min(len(piece), at + len(sent))
                memory = np.frombuffer(piece, dtype=np.uint8)[at:end]
                corrupt(memory, rng)
                is_spoilt.set()

        self._spoil = spoil
        try:
            link.ask("echo", b"", [memoryview(sent)], into=[memoryview(into)], deadline_s=_DEADLINE_S)
        except KvasirError:
            assert is_spoilt.is_set(), "nothing was wrong, and it was refused"
            return all(found == sent for found in self._echo.committed)
        finally:
            link.close()
        assert is_spoilt.is_set(), "a piece of the payload that could not be found"
        return False

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._middle.accept()
            except OSError:
                return
            far = socket.create_connection(split_address(self._listener.address))
            for source, sink, is_coming in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass_on, args=(source, sink, is_coming), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_coming: bool) -> None:
        try:
            while piece := bytearray(source.recv(_PIPE_BYTES)):
                if self._spoil is not None:
                    self._spoil(piece, is_coming)
                sink.sendall(piece)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # Wakes the reader; its owner closes the socket.
            source.close()

    def close(self) -> None:
        self._middle.close()
        self._listener.close(5.0)


def small_attention(blocks: int, layers: int, shape: tuple[int, int, int]) -> PagedAttention:
    """Return an attention whose pools contain noise."""
    made = PagedAttention(
        [LayerShape(*shape)] * layers,
        kv_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for pools in made.pools:
        for pool in pools:
            pool.normal_()
    return made
