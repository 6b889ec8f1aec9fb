"""`python -m bench.micro.distattention.creditor SETTINGS`: a worker that only lends, in a process of its own.

It has pools with seeded noise in them, and no model: to attend to somebody's keys none is needed. Prints its
address and a ticket as one line of JSON and serves until its standard input ends. `lenders` starts some.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from bench.kit.cores import bind_threads
from bench.kit.provenance import ROOT
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor, GrantBook
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.peers.transport.tickets import WorkerDesk
from shared.errors import InternalError

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


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    bind_threads({settings.core})
    torch.set_num_threads(1)
    attention = make_attention(settings.layers, settings.blocks, settings.block_tokens)
    fill(attention, 0, settings.blocks, settings.seed)
    book = GrantBook()
    book.grant(DEBTOR.worker_id, GRANT, range(settings.blocks))
    creditor = Creditor(attention, book, ComputeBudget(1.0), block_tokens=settings.block_tokens)
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
