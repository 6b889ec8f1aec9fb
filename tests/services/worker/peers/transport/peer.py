"""Another worker's end of the bulk plane as a process, so that it can be killed and stopped.

`python -m tests.services.worker.peers.transport.peer TRANSPORT` takes commands, one JSON list a line, and
answers each with one line. `Process` starts it and speaks with it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.worker.peers.transport.base import Buffer, Peer, TransportLimits
from services.worker.peers.transport.digest import PayloadDigest
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.plane import BulkTransport
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.shm import ShmTransport
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.peers.transport.ucx import UcxTransport
from shared.errors import KvasirError
from tests.services.worker.peers.transport.receivers import furnish, pattern

TRANSPORTS: dict[str, Callable[[], BulkTransport]] = {
    "tcp": TcpTransport,
    "shm": ShmTransport,
    "ucx": UcxTransport,
}
"""Transports under test; one that is not installed raises ConfigError."""
OWN = Peer("worker-peer", 7)


class Process:
    """The other process, as the test controls it."""

    def __init__(self, transport: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.services.worker.peers.transport.peer", transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._popen.pid
        self.peer = OWN
        self.address = str(self.answer())

    def tell(self, *command: Any) -> None:
        """Send a command without waiting for the answer."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command) + "\n")
        self._popen.stdin.flush()

    def answer(self) -> Any:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.answer()

    def ticket(self, own: Peer) -> bytes:
        return bytes.fromhex(self.ask("ticket", own.worker_id, own.incarnation))

    def send_signal(self, number: signal.Signals) -> None:
        """Stop the process; on return it no longer runs."""
        os.kill(self.pid, number)
        until_s = time.monotonic() + 5.0
        while number == signal.SIGSTOP and _state(self.pid) != "T" and time.monotonic() < until_s:
            time.sleep(0.002)

    def end(self) -> None:
        """Send SIGKILL, even to a stopped process."""
        self._popen.kill()
        self._popen.wait(10)
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            stream.close()


class Commands:
    def __init__(self, transport: str) -> None:
        self._transport = TRANSPORTS[transport]()
        self._desk = WorkerDesk(OWN, TransportLimits(links=8, idle_s=30.0))
        self._counts = furnish(self._desk)
        self._listener = self._transport.listen(self._desk)
        self.address = self._listener.address
        self._link: PeerLink | None = None

    def ticket(self, worker_id: str, incarnation: int) -> str:
        return self._desk.issue(Peer(worker_id, incarnation), valid_for_s=30.0).hex()

    def counts(self) -> dict[str, int]:
        return {name: getattr(self._counts, name) for name in ("admitted", "committed", "abandoned")}

    def links(self) -> int:
        return len(self._listener.links)

    def peak_bytes(self) -> int:
        """Return the peak memory of this process."""
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024

    def dial(self, address: str, peer_id: str, incarnation: int, ticket: str) -> str:
        peer = Peer(peer_id, incarnation)
        self._link = self._transport.dial(address, OWN, peer, bytes.fromhex(ticket), deadline_s=10.0)
        return "ok"

    def keep(self, sizes: list[int], deadline_s: float) -> str:
        """Send one `keep` message over the link of `dial`; return the name of the outcome."""
        assert self._link is not None
        buffers: list[Buffer] = [pattern(size) for size in sizes]
        try:
            return self._link.ask("keep", b"", buffers, deadline_s=deadline_s).header.decode()
        except KvasirError as error:
            return type(error).__name__

    def lie(self) -> str:
        """Make this process's digests wrong, as if its data were corrupted in transit."""
        update = PayloadDigest.update

        def wrong(self: PayloadDigest, group: Any) -> None:
            update(self, group)
            self.value ^= 1

        PayloadDigest.update = wrong  # type: ignore[method-assign]
        return "ok"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def main() -> None:
    commands = Commands(sys.argv[1])
    _say(commands.address)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        _say(getattr(commands, name)(*arguments))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
