"""Messages with raw buffers between two workers, request and reply: the types that both ends share.

The asking side dials a link (`link.PeerLink`) with a ticket, a secret that the answering worker issued to it.
The answering side serves each link on a thread of its own, and calls the *receiver* of the kind of message
there; several threads may call a receiver at once. A receiver says where the buffers go before a byte is
read, and allocates only what it admits. `docs/bulk.md` lists the guarantees. Knows no header's content.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from services.worker.peers.transport.pipe import Pipe

Buffer = memoryview
"""One-dimensional contiguous bytes, format `B`; writable where data is received into it.
`bytes_of` makes one of a tensor or array without a copy."""

Buffers = Sequence[Buffer]

INLINE_BYTES = 64 << 10
"""Payloads up to this size travel with their envelope, on every transport. While calls of a link are
outstanding, only such payloads may be sent: with a larger one, both ends could wait for each other."""


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Limits of one end. A message above them is refused before its payload is received."""

    header_bytes: int = 1 << 20
    buffers: int = 1 << 16
    message_bytes: int = 1 << 30
    links: int = 64
    """Links open to one listener."""
    outstanding: int = 64
    """Unfinished calls of one link."""
    idle_s: float = 600.0
    """A link without a request for this long is closed."""


class Peer(NamedTuple):
    """A worker at one end of a link; the larger incarnation is the current one."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A receiver's reply. `header` is the receiver's own format, MessagePack by convention."""

    header: bytes = b""
    buffers: Buffers = ()
    sequel: "Callable[[Pipe], None] | None" = None
    """Called on the link's thread after the reply was sent, for an exchange in a form of its own, with
    deadlines that both ends know. A KvasirError ends the link."""


@dataclass(frozen=True, slots=True)
class Reception:
    """An incoming message that a receiver admitted. Either `commit` or `abandon` is called, once.

    Nothing writes into the buffers after that call."""

    commit: Callable[[], Reply]
    """Process a payload that arrived intact. A KvasirError is sent to the peer."""
    abandon: Callable[[], None] = field(default=lambda: None)
    """Release the buffers: the payload never arrives, or the peer gave up. Must not raise."""
    buffers: Buffers = ()
    """Memory for the payload, with exactly the announced sizes, in their order."""


Receiver = Callable[[Peer, bytes, Sequence[int]], Reception]
"""Takes messages of one kind: admits one with this header and these sizes of buffers, in bytes. Raises
KvasirError to refuse: the peer gets it."""


@dataclass(frozen=True, slots=True)
class PeerReply:
    """A peer's reply, seen from the asking side."""

    header: bytes
    buffers: int
    """How many leading buffers of `into` were filled."""


def bytes_of(memory: "torch.Tensor | npt.NDArray[Any] | bytearray | bytes | memoryview") -> Buffer:
    """Return the bytes in place. Raises ValueError when they are not contiguous or not in CPU memory."""
    if isinstance(memory, np.ndarray):
        if not memory.flags.c_contiguous:
            raise ValueError("a contiguous array is needed")
        return memory.reshape(-1).view(np.uint8).data
    if isinstance(memory, bytes | bytearray | memoryview):
        return memoryview(memory).cast("B")
    if not memory.is_contiguous() or memory.device.type != "cpu":
        raise ValueError(f"a contiguous tensor on the CPU is needed, not one on {memory.device}")
    from torch import uint8

    array: npt.NDArray[np.uint8] = memory.detach().reshape(-1).view(uint8).numpy()
    return array.data


def sizes_of(buffers: Buffers) -> list[int]:
    """Return the size of each buffer in bytes."""
    return [buffer.nbytes for buffer in buffers]
