"""A creditor as a process: `python -m tests.services.worker.peers.attention.process SEED_MODEL BLOCKS NAME`.

It prints its address and ticket as one JSON line, serves until its standard input ends.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.tcp import TcpTransport

ROOT = Path(__file__).parents[5]
_START_S = 120.0


@dataclass
class CreditorProcess:
    """A running one."""

    process: "subprocess.Popen[str]"
    name: str
    address: str
    ticket: bytes

    def dial(self, debtor: Peer) -> PeerLink:
        return TcpTransport().dial(self.address, debtor, Peer(self.name, 1), self.ticket, deadline_s=10.0)


@contextmanager
def creditor_processes(architecture: str, blocks: int, names: list[str]) -> Iterator[list[CreditorProcess]]:
    """Started together; what still runs is ended."""
    module = "tests.services.worker.peers.attention.process"
    command = [sys.executable, "-m", module, architecture, str(blocks)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, name], cwd=ROOT, **pipes) for name in names]
    try:
        running = []
        for name, process in zip(names, started, strict=True):
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            running.append(CreditorProcess(process, name, said["address"], bytes.fromhex(said["ticket"])))
        yield running
    finally:
        for process in started:
            process.kill()
            process.communicate()


def main() -> None:
    from services.worker.peers.attention.core.cost import ComputeBudget
    from services.worker.peers.attention.creditor import Creditor
    from services.worker.peers.transport.plane import WorkerDesk
    from tests.services.worker.conftest import build_model
    from tests.services.worker.peers.attention.rig import BLOCK_TOKENS, DEBTOR, GRANT, GrantBook, make_engine

    architecture, blocks, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    engine = make_engine(build_model(architecture), blocks)
    book = GrantBook()
    creditor = Creditor(engine.attention, book, ComputeBudget(1.0), block_tokens=BLOCK_TOKENS)
    book.grant(DEBTOR.worker_id, GRANT, range(blocks))
    desk = WorkerDesk(Peer(name, 1))
    for kind, receiver in creditor.receivers.items():
        desk.serve(kind, receiver)
    listener = TcpTransport().listen(desk)
    ticket = desk.issue(DEBTOR, valid_for_s=_START_S)
    print(json.dumps({"address": listener.address, "ticket": ticket.hex()}), flush=True)
    sys.stdin.read()
    listener.close(5.0)


if __name__ == "__main__":
    main()
