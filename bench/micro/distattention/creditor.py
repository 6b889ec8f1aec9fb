"""`python -m bench.micro.distattention.creditor SETTINGS`: a worker that only lends, in a process of its own.

It has pools with seeded noise in them, and no model: to attend to somebody's keys none is needed. Prints its
address and a ticket as one line of JSON and serves until its standard input ends. `lenders` starts some.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from bench.kit.cores import bind_threads
from bench.kit.provenance import ROOT
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.plane import WorkerDesk
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import InternalError
from shared.messages.lending import BorrowBlocks

DEBTOR = Peer("bench-debtor", 1)
GRANT = GrantRef(1, 1)
_TICKET_S = 120.0
_DIAL_S = 10.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one creditor."""

    name: str
    layers: tuple[tuple[int, int, int], ...]
    """KV heads, key and value size of each."""
    blocks: int
    block_tokens: int
    seed: int
    core: int
    """To be bound to."""


def make_attention(layers: Any, blocks: int, block_tokens: int) -> PagedAttention:
    """Pools of these shapes, empty."""
    return PagedAttention(
        [LayerShape(*layer) for layer in layers],
        kv_blocks=blocks,
        block_tokens=block_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def fill(attention: PagedAttention, first: int, end: int, seed: int) -> None:
    """Blocks from `first` to `end` of every layer get noise that depends on the seed only."""
    for pools in attention.pools:
        for pool in pools:
            generator = torch.Generator().manual_seed(seed)
            pool[first:end] = torch.randn((end - first, *pool.shape[1:]), generator=generator)


@contextmanager
def lenders(settings: Sequence[Settings]) -> Iterator[list[PeerLink]]:
    """A link to each. Raises InternalError when one does not start."""
    started = [_start(each) for each in settings]
    links: list[PeerLink] = []
    try:
        for each, process in zip(settings, started, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise InternalError(f"creditor {each.name} ended with code {process.wait()}")
            said = json.loads(line)
            ticket = bytes.fromhex(said["ticket"])
            links.append(
                TcpTransport().dial(said["address"], DEBTOR, Peer(each.name, 1), ticket, deadline_s=_DIAL_S)
            )
        yield links
    finally:
        for link in links:
            link.close()
        for process in started:
            process.kill()
            process.communicate()


def _start(settings: Settings) -> "subprocess.Popen[str]":
    encoded = msgspec.json.encode(settings).decode()
    return subprocess.Popen(
        [sys.executable, "-m", "bench.micro.distattention.creditor", encoded],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _all_lent(settings: Settings) -> LentGrants:
    """Every block, to the debtor, by its first grant, and for longer than a bench takes."""
    table = RBlockTable(settings.name, settings.blocks)
    grants = Grants(table, 1, Terms(settings.blocks, lease_s=1e9), threading.RLock())
    asked = BorrowBlocks(
        debtor_id=DEBTOR.worker_id,
        debtor_incarnation=DEBTOR.incarnation,
        request=1,
        blocks=settings.blocks,
    )
    grants.lend(asked, range(settings.blocks), 0.0)
    return LentGrants(grants, table, lambda freed: None)


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    bind_threads({settings.core})
    torch.set_num_threads(1)
    attention = make_attention(settings.layers, settings.blocks, settings.block_tokens)
    fill(attention, 0, settings.blocks, settings.seed)
    creditor = Creditor(
        attention, _all_lent(settings), ComputeBudget(1.0), block_tokens=settings.block_tokens
    )
    desk = WorkerDesk(Peer(settings.name, 1))
    for kind, receiver in creditor.receivers.items():
        desk.serve(kind, receiver)
    listener = TcpTransport().listen(desk)
    ticket = desk.issue(DEBTOR, valid_for_s=_TICKET_S)
    print(json.dumps({"address": listener.address, "ticket": ticket.hex()}), flush=True)
    sys.stdin.read()
    listener.close(5.0)


if __name__ == "__main__":
    main()
