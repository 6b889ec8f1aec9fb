"""Creditors on threads of this process, reached over real TCP, and debtors whose blocks they hold."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.peers.attention.core.cost import ComputeBudget, ShipMode, choose_mode
from services.worker.peers.attention.creditor import Creditor
from services.worker.peers.attention.debtor import Chooser, Debtor
from services.worker.peers.attention.memory import LentMemory, device_memory, host_memory
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.server import SocketListener, WorkerDesk
from services.worker.peers.transport.tcp import TcpTransport
from shared.messages.lending import KvTier

DEBTOR = Peer("worker-debtor", 7)
GRANT, HOST_GRANT = GrantRef(1, 1), GrantRef(2, 1)
"""Grants of all device memory, and of all host memory."""
BLOCK_TOKENS = 4
_numbers = count()


class GrantBook:
    """`AccessGrants` that last until they are replaced."""

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

    def lent(self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier) -> npt.NDArray[np.int64]:
        found = np.zeros(1 << 10, dtype=np.int64)
        with self._lock:
            for ref in grants:
                at, held = self._held.get((debtor.worker_id, ref.grant_id), (tier, frozenset[int]()))
                found[list(held) if at is tier else []] = ref.grant_id
        return found

    def loans(
        self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64] | None:
        of: dict[int, int] = {}
        with self._lock:
            for ref in grants:
                at, held = self._held.get((debtor.worker_id, ref.grant_id), (tier, frozenset[int]()))
                of |= dict.fromkeys(held, ref.grant_id) if at is tier else {}
        if not of.keys() >= set(blocks.tolist()):
            return None
        return np.array([of[block] for block in blocks.tolist()], dtype=np.int64)


@dataclass
class Lender:
    """A worker that lends all its blocks."""

    engine: TorchEngine
    creditor: Creditor
    book: GrantBook
    desk: WorkerDesk
    listener: SocketListener
    host: LentMemory | None = None

    def dial(self) -> PeerLink:
        ticket = self.desk.issue(DEBTOR, valid_for_s=5.0)
        return TcpTransport().dial(self.listener.address, DEBTOR, self.desk.own, ticket, deadline_s=5.0)


def make_engine(model: Any, blocks: int, attention: AttentionMode = "auto") -> TorchEngine:
    return TorchEngine(describe(model), kv_blocks=blocks, block_tokens=BLOCK_TOKENS, attention=attention)


@contextmanager
def lender(
    model: Any,
    blocks: int,
    *,
    fraction: float = 1.0,
    is_busy: Callable[[], bool] = lambda: False,
    host_blocks: int = 0,
    host_attends: bool = True,
    attention: AttentionMode = "auto",
) -> Iterator[Lender]:
    engine = make_engine(model, blocks, attention)
    host = host_memory(engine.attention, host_blocks, attends=host_attends) if host_blocks else None
    book = GrantBook()
    budget = ComputeBudget(fraction)
    creditor = Creditor(
        device_memory(engine.attention), book, budget, block_tokens=BLOCK_TOKENS, is_busy=is_busy, host=host
    )
    desk = WorkerDesk(Peer(f"worker-creditor-{next(_numbers)}", 1))
    for kind, receiver in creditor.receivers.items():
        desk.serve(kind, receiver)
    book.grant(DEBTOR.worker_id, GRANT, range(blocks))
    book.grant(DEBTOR.worker_id, HOST_GRANT, range(host_blocks), KvTier.HOST)
    listener = TcpTransport().listen(desk)
    try:
        yield Lender(engine, creditor, book, desk, listener, host)
    finally:
        assert listener.close(5.0)


def make_debtor(
    engine: TorchEngine,
    lenders: list[Lender],
    blocks_each: int,
    *,
    choose: Chooser = choose_mode,
) -> Debtor:
    """Like `connect`, over new links."""
    return connect(engine, [each.dial() for each in lenders], blocks_each, choose=choose)


def connect(
    engine: TorchEngine,
    links: list[PeerLink],
    blocks_each: int,
    *,
    choose: Chooser = choose_mode,
    staging_blocks: int = 3,
    deadline_s: float = 5.0,
    q_heads: int = 4,
) -> Debtor:
    """Map ids above the engine's own to the lenders: `blocks_each` to the first, and so on."""
    debtor = Debtor(
        engine.attention,
        q_heads=q_heads,
        own_blocks=engine.own_ids,
        block_tokens=BLOCK_TOKENS,
        staging_blocks=staging_blocks,
        deadline_s=deadline_s,
        choose=choose,
    )
    for index, link in enumerate(links):
        first = engine.own_ids + index * blocks_each
        holder = debtor.add(link, [GRANT])
        debtor.homes.place(range(first, first + blocks_each), holder, range(blocks_each))
    return debtor


def add_host(
    debtor: Debtor, owner: Lender, ids: Sequence[int], *, attends: bool = True, blocks: Sequence[int] = ()
) -> int:
    """Map ids to blocks of the lender's host memory, by default its first ones."""
    holder = debtor.add(owner.dial(), [HOST_GRANT], KvTier.HOST, attends=attends)
    debtor.homes.place(ids, holder, blocks or range(len(ids)))
    return holder


def always(mode: ShipMode) -> Chooser:
    return lambda work, speeds: mode
