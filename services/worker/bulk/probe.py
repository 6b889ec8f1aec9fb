"""What a link's transport moves in a second: a few transfers that nobody needs, timed. Knows no choice."""

import time
from collections.abc import Sequence

from services.worker.bulk.base import Buffer, Link, Peer, Reply
from shared.errors import MessageTooLarge

KIND = "bulk.probe"
PROBE_BYTES = 2 << 20
_ROUNDS = 3
"""The first fills caches and windows, and does not count."""


class Probes:
    """`base.Receiver`: takes bytes and drops them."""

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Probe":
        if sum(sizes_bytes) > PROBE_BYTES or len(sizes_bytes) > 1:
            raise MessageTooLarge(f"a probe is one buffer of at most {PROBE_BYTES} bytes")
        return _Probe(sizes_bytes)


class _Probe:
    """`base.Reception`."""

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self.buffers: Sequence[Buffer] = [memoryview(bytearray(size)) for size in sizes_bytes]

    def commit(self) -> Reply:
        return Reply()

    def abandon(self) -> None:
        """The memory is nobody's."""


def fastest_s(link: Link, deadline_s: float) -> float:
    """Of some transfers of `PROBE_BYTES`, until the peer has verified them. Raises KvasirError."""
    data = memoryview(bytearray(PROBE_BYTES))
    until_s = time.monotonic() + deadline_s
    took_s = []
    for _ in range(_ROUNDS):
        began_s = time.monotonic()
        link.ask(KIND, b"", [data], deadline_s=max(0.001, until_s - began_s))
        took_s.append(time.monotonic() - began_s)
    return min(took_s[1:])
