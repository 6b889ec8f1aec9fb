"""Creditors on threads of this process, reached over real TCP, and debtors whose blocks they hold."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.peers.attention.core.cost import ComputeBudget, ShipMode, choose_mode
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.debtor import AttendingDebtor, Chooser
from services.worker.peers.attention.memory import device_memory, host_memory
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.tcp import TcpTransport
from shared.messages.lending import KvTier
from tests.services.worker.peers.lending.builders import borrow, give_back

DEBTOR = Peer("worker-debtor", 7)
GRANT, HOST_GRANT = GrantRef(1, 1), GrantRef(2, 1)
"""Grants of all device memory, and of all host memory."""
BLOCK_TOKENS = 4
HEADS, KV_HEADS, DIM = 4, 2, 16
_numbers = count()


class Book:
    """A creditor's grants to `DEBTOR`, one for each group of device blocks, then one of all host blocks.

    Leases end after 4.5 s by `now_s`."""

    def __init__(self, device: Sequence[Sequence[int]], blocks: int, host_blocks: int = 0) -> None:
        self.now_s = 0.0
        self.freed: list[Freed] = []
        terms = Terms(blocks, 4.0, 0.5, most_host_blocks=host_blocks)
        self.grants = Grants("creditor", 1, terms, blocks, host_blocks, threading.RLock())
        self.lent = LentGrants(self.grants, self.freed.append, lambda: self.now_s)
        self.refs: list[GrantRef] = []
        for group in device:
            self.lend(group)
        if host_blocks:
            self.lend(range(host_blocks), KvTier.HOST)

    def lend(self, blocks: Sequence[int], tier: KvTier = KvTier.DEVICE) -> None:
        asked = borrow(DEBTOR.worker_id, incarnation=7, request=len(self.refs) + 1, tier=tier)
        grant = self.grants.lend(asked, blocks, self.now_s).grant
        assert grant is not None
        self.refs.append(GrantRef(grant.grant_id, grant.generation))

    def give_back(self, grant_id: int, *blocks: int) -> None:
        freed = self.grants.give_back(give_back(DEBTOR.worker_id, grant_id, *blocks, incarnation=7))[1]
        self.freed += [] if freed is None else [freed]


class Lender:
    """A worker that lends `lent`, by default all its blocks in one grant. Its clock stands still."""

    def __init__(
        self,
        model: Any,
        blocks: int,
        *,
        lent: Sequence[Sequence[int]] | None = None,
        fraction: float = 1.0,
        is_busy: Callable[[], bool] = lambda: False,
        host_blocks: int = 0,
        host_attends: bool = True,
        attention: AttentionMode = "auto",
    ) -> None:
        self.engine = engine = make_engine(model, blocks, attention)
        self.host = host_memory(engine.attention, host_blocks, attends=host_attends) if host_blocks else None
        self.book = Book([range(blocks)] if lent is None else lent, blocks, host_blocks)
        self.creditor = Creditor(
            device_memory(engine.attention),
            self.book.lent,
            ComputeBudget(fraction),
            block_tokens=BLOCK_TOKENS,
            is_busy=is_busy,
            host=self.host,
        )
        self.desk = WorkerDesk(Peer(f"worker-creditor-{next(_numbers)}", 1))
        self.desk.serve(self.creditor.receivers)
        self.listener = TcpTransport().listen(self.desk)

    def dial(self) -> PeerLink:
        ticket = self.desk.issue(DEBTOR, valid_for_s=5.0)
        return TcpTransport().dial(self.listener.address, DEBTOR, self.desk.own, ticket, deadline_s=5.0)


@contextmanager
def lender(model: Any, blocks: int, **how: Any) -> Iterator[Lender]:
    made = Lender(model, blocks, **how)
    try:
        yield made
    finally:
        assert made.listener.close(5.0)


def make_engine(model: Any, blocks: int, attention: AttentionMode = "auto") -> TorchEngine:
    return TorchEngine(describe(model), kv_blocks=blocks, block_tokens=BLOCK_TOKENS, attention=attention)


def make_debtor(engine: TorchEngine, lenders: list[Lender], blocks_each: int, **how: Any) -> AttendingDebtor:
    return connect(engine, [each.dial() for each in lenders], blocks_each, **how)


def connect(
    engine: TorchEngine,
    links: list[PeerLink],
    blocks_each: int,
    *,
    choose: Chooser = choose_mode,
    staging_blocks: int = 3,
    deadline_s: float = 5.0,
) -> AttendingDebtor:
    """Map ids above the engine's own to the lenders: `blocks_each` to the first, and so on."""
    debtor = AttendingDebtor(
        engine.attention,
        q_heads=HEADS,
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
    debtor: AttendingDebtor,
    owner: Lender,
    ids: Sequence[int],
    *,
    attends: bool = True,
    blocks: Sequence[int] = (),
) -> None:
    """Map ids to blocks of the lender's host memory, by default its first ones."""
    holder = debtor.add(owner.dial(), [HOST_GRANT], KvTier.HOST, attends=attends)
    debtor.homes.place(ids, holder, blocks or range(len(ids)))


def always(mode: ShipMode) -> Chooser:
    return lambda work, speeds: mode


def content(engine: TorchEngine) -> list[torch.Tensor]:
    return [pool.clone() for pools in engine.pools for pool in pools]


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
