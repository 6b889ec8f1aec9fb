"""The peer process of `bench bulk`: receives messages by one transport, or bytes from a bare socket.

Prints address and ticket as one line of JSON, and serves until its standard input ends.
"""

import json
import socket
import sys
import threading
from collections.abc import Sequence

import numpy as np

from services.worker.core.settings import BulkConfig
from services.worker.peers.transport.base import Buffer, Peer, Reception, Reply
from services.worker.peers.transport.plane import make_transports
from services.worker.peers.transport.server import WorkerDesk

ASKING, ANSWERING = Peer("bench-asking", 1), Peer("bench-answering", 1)
MOST_BYTES = 256 << 20
BARE_CHUNK_BYTES = 1 << 20


class Sink:
    """Receives messages into one buffer, and returns them if the header asks for it."""

    def __init__(self) -> None:
        self._memory = np.ones(MOST_BYTES, np.uint8).data

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        buffers: list[Buffer] = [self._memory[: sum(sizes_bytes)]] if sizes_bytes else []
        reply = Reply(b"", buffers if header == b"back" else ())
        return Reception(lambda: reply, buffers=buffers)


def serve_bare(listener: socket.socket) -> None:
    """Reply with one byte to every message: eight bytes of length, then the data."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = np.ones(MOST_BYTES, np.uint8).data
    with connection:
        while True:
            head = connection.recv(8, socket.MSG_WAITALL)
            if len(head) < 8:
                return
            size, got = int.from_bytes(head, "little"), 0
            while got < size:
                got += connection.recv_into(memory[got : min(size, got + BARE_CHUNK_BYTES)])
            connection.send(b"!")


def main() -> None:
    name = sys.argv[1]
    if name == "bare":
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=serve_bare, args=(listener,), daemon=True).start()
        _say({"address": f"127.0.0.1:{listener.getsockname()[1]}", "ticket": ""})
    else:
        desk = WorkerDesk(ANSWERING)
        desk.serve({"sink": Sink().admit})
        transport = make_transports(BulkConfig(transports=(name,)))[0]  # type: ignore[arg-type]
        address = transport.listen(desk).address
        _say({"address": address, "ticket": desk.issue(ASKING, valid_for_s=60.0).hex()})
    sys.stdin.read()


def _say(line: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
