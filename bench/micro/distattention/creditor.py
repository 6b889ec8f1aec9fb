"""`python -m bench.micro.distattention.creditor SETTINGS`: a process that only lends.

It has pools of seeded noise and no model, which attention does not need. It prints address and ticket as one
line of JSON and serves until its standard input ends. `lenders` starts such processes.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from bench.kit.cores import bind_threads
from bench.kit.processes import Child
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.loading import LoadedModel
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.memory import device_memory
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.tcp import TcpTransport
from shared.messages.lending import BorrowBlocks

DEBTOR = Peer("bench-debtor", 1)
GRANT = GrantRef(1, 1)
_TICKET_S = 120.0
_DIAL_S = 10.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one creditor."""

    name: str
    layers: tuple[tuple[int, int, int], ...]
    """(KV heads, key size, value size) of each layer."""
    blocks: int
    block_tokens: int
    seed: int
    core: int
    """Core to bind to."""


def settings_of(
    model: LoadedModel, blocks: int, core: int, block_tokens: int, name: str = "creditor"
) -> Settings:
    """Return the settings of a creditor for `model`."""
    layers = tuple((layer.kv_heads, layer.head_dim, layer.value_dim) for layer in model.layers)
    return Settings(name=name, layers=layers, blocks=blocks, block_tokens=block_tokens, seed=1, core=core)


def make_attention(layers: Any, blocks: int, block_tokens: int) -> PagedAttention:
    """Return an attention with empty pools of these shapes."""
    return PagedAttention(
        [LayerShape(*layer) for layer in layers],
        kv_blocks=blocks,
        block_tokens=block_tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def fill(attention: PagedAttention, first: int, end: int, seed: int) -> None:
    """Fill blocks `first` to `end` of every layer with noise that depends only on the seed."""
    for pools in attention.pools:
        for pool in pools:
            generator = torch.Generator().manual_seed(seed)
            pool[first:end] = torch.randn((end - first, *pool.shape[1:]), generator=generator)


@dataclass(frozen=True)
class CreditorProcess:
    """A running creditor, with a ticket for one connection."""

    process: "subprocess.Popen[str]"
    name: str
    address: str
    ticket: bytes

    def dial(self, debtor: Peer) -> PeerLink:
        """Connect to the creditor. Raises KvasirError."""
        creditor = Peer(self.name, 1)
        return TcpTransport().dial(self.address, debtor, creditor, self.ticket, deadline_s=_DIAL_S)


@contextmanager
def creditor_processes(modules: Mapping[str, Sequence[str]]) -> Iterator[list[CreditorProcess]]:
    """Start modules that call `serve`, with their arguments, by name; end them with the block. Raises
    InternalError if one does not start."""
    with ExitStack() as children:
        started = {name: children.enter_context(Child(*words)) for name, words in modules.items()}
        said = {name: child.hear() for name, child in started.items()}
        yield [
            CreditorProcess(started[name].process, name, it["address"], bytes.fromhex(it["ticket"]))
            for name, it in said.items()
        ]


def serve(creditor: Creditor, name: str, debtor: Peer) -> None:
    """Print address and ticket as one line of JSON, and serve until standard input ends."""
    desk = WorkerDesk(Peer(name, 1))
    desk.serve(creditor.receivers)
    listener = TcpTransport().listen(desk)
    ticket = desk.issue(debtor, valid_for_s=_TICKET_S)
    print(json.dumps({"address": listener.address, "ticket": ticket.hex()}), flush=True)
    sys.stdin.read()
    listener.close(5.0)


@contextmanager
def lenders(settings: Sequence[Settings]) -> Iterator[list[PeerLink]]:
    """Yield a link to each creditor. Raises InternalError if one does not start."""
    module = "bench.micro.distattention.creditor"
    modules = {each.name: (module, msgspec.json.encode(each).decode()) for each in settings}
    with creditor_processes(modules) as running, ExitStack() as links:
        yield [links.enter_context(closing(one.dial(DEBTOR))) for one in running]


def _all_lent(settings: Settings) -> LentGrants:
    """Lend every block to the debtor in its first grant, for longer than a bench takes."""
    terms = Terms(settings.blocks, lease_s=1e9)
    grants = Grants(settings.name, 1, terms, settings.blocks, lock=threading.RLock())
    asked = BorrowBlocks(
        debtor_id=DEBTOR.worker_id, debtor_incarnation=DEBTOR.incarnation, request=1, blocks=settings.blocks
    )
    grants.lend(asked, range(settings.blocks), 0.0)
    return LentGrants(grants, lambda freed: None)


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    bind_threads({settings.core})
    torch.set_num_threads(1)
    attention = make_attention(settings.layers, settings.blocks, settings.block_tokens)
    fill(attention, 0, settings.blocks, settings.seed)
    creditor = Creditor(
        device_memory(attention), _all_lent(settings), ComputeBudget(1.0), block_tokens=settings.block_tokens
    )
    serve(creditor, settings.name, DEBTOR)


if __name__ == "__main__":
    main()
