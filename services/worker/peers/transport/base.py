"""A bulk transport's interface: framed messages with raw buffers between two workers, request and reply.

The asking side dials a *link*. A link belongs to one thread at a time and blocks it; every call has a
deadline. From asyncio, use `await asyncio.to_thread(link.ask, …)`. For small quick requests beside large
transfers, dial two links. The answering side serves each link on a thread of its own, and calls the
*receiver* registered for the kind of message there. Several threads may call a receiver at once.

    call = link.begin("attention", header, [bytes_of(q)], into=[bytes_of(o), bytes_of(lse)], deadline_s=0.05)
    ...                                   # own work, while the peer computes
    answer = call.finish()                # o and lse are filled

Rules for every transport (`tests/services/worker/peers/transport/test_base.py`):

- Dialling takes a ticket: a secret that the answering worker issued to this peer, valid once and briefly.
- A receiver first says where the buffers go. Then it learns that they arrived intact (`commit`) or never will
  (`abandon`); nothing writes into its buffers after either call.
- A side that gives up, on a deadline or an error, aborts the link, and a failed link is never used again. The
  other side abandons what was under way, so a peer that was stopped and resumes commits nothing.
- A failed transfer may leave parts of `into` and of admitted buffers overwritten. Use their content only
  after `finish` returned or `commit` was called.
- Sizes are checked first: a peer's announcement alone allocates nothing.

Knows neither blocks nor requests, nor the content of a header.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from services.worker.peers.transport.pipe import Pipe

Buffer = memoryview
"""One-dimensional contiguous bytes, format `B`; writable where data is received into it.
`bytes_of` makes one of a tensor or array without a copy."""

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


@dataclass(frozen=True, slots=True)
class Peer:
    """The worker at the other end of a link."""

    worker_id: str
    incarnation: int
    """The larger number is the current one."""


class Sequel(Protocol):
    """An exchange in a form of its own, after a reply and before the next message."""

    def run(self, pipe: "Pipe") -> None:
        """Run on the link's thread after the reply was sent, with deadlines that both ends know.

        Raises KvasirError to end the link."""
        ...

    def abandon(self) -> None:
        """Called instead of `run` when the reply could not be sent. Must not raise."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """A receiver's reply. `header` is the receiver's own format, MessagePack by convention."""

    header: bytes = b""
    buffers: Sequence[Buffer] = ()
    done: Callable[[], None] = field(default=lambda: None)
    """Called once, when the transport no longer reads `buffers`."""
    sequel: Sequel | None = None
    """Exactly one of its methods is called, once."""


class Reception(Protocol):
    """An incoming message that a receiver admitted."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """Memory for the payload, with exactly the announced sizes, in their order."""
        ...

    def commit(self) -> Reply:
        """Process a payload that arrived intact. A KvasirError is sent to the peer."""
        ...

    def abandon(self) -> None:
        """Release the buffers: the payload never arrives, or the peer gave up. Must not raise."""
        ...


Receiver = Callable[[Peer, bytes, Sequence[int]], Reception]
"""Takes messages of one kind at the answering end of a link: admits one with this header and these sizes of
buffers, in bytes. Raises KvasirError to refuse: the peer gets it."""


@dataclass(frozen=True, slots=True)
class PeerReply:
    """A peer's reply, seen from the asking side."""

    header: bytes
    buffers: int
    """How many leading buffers of `into` were filled."""


class Call(Protocol):
    """A request that was sent, and whose reply was not read yet."""

    def finish(self) -> PeerReply:
        """Wait for the reply, until the deadline given to `begin`. Calls finish in the order they began.

        Raises DeadlineExceeded, PeerLost, or InvalidMessage for a reply that was corrupted or did not fit
        `into`: these close the link. Raises the KvasirError of the peer's receiver."""
        ...


class PeerLink(Protocol):
    """A connection to one peer by one transport. For one thread at a time."""

    @property
    def peer(self) -> Peer: ...

    @property
    def transport(self) -> str: ...

    @property
    def closed(self) -> bool:
        """Whether either end or an error closed the link, as far as is known here."""
        ...

    def begin(
        self,
        kind: str,
        header: bytes = b"",
        buffers: Sequence[Buffer] = (),
        *,
        into: Sequence[Buffer] = (),
        deadline_s: float,
    ) -> Call:
        """Send a request. `buffers` may be reused on return; `into` belongs to the call until it finishes.

        The reply has at most as many buffers as `into`, each of exactly its target's size. Raises
        DeadlineExceeded and PeerLost, which close the link, or MessageTooLarge and Overloaded, when
        nothing was sent (see `TransportLimits`, `INLINE_BYTES`)."""
        ...

    def ask(
        self,
        kind: str,
        header: bytes = b"",
        buffers: Sequence[Buffer] = (),
        *,
        into: Sequence[Buffer] = (),
        deadline_s: float,
    ) -> PeerReply:
        """`begin(…).finish()`."""
        ...

    @property
    def raw(self) -> "Pipe":
        """The socket, for the exchange after a reply (`Sequel`). Close the link when that fails."""
        ...

    def close(self) -> None:
        """Abort what is under way. Idempotent; the only method for other threads."""
        ...


def bytes_of(memory: "torch.Tensor | npt.NDArray[Any] | bytearray | bytes | memoryview") -> Buffer:
    """Return the bytes in place. Raises ValueError when they are not contiguous or not in CPU memory."""
    if isinstance(memory, np.ndarray):
        if not memory.flags.c_contiguous:
            raise ValueError("a contiguous array is needed")
        return memory.reshape(-1).view(np.uint8).data
    if isinstance(memory, bytes | bytearray | memoryview):
        return memoryview(memory).cast("B")
    return _bytes_of_tensor(memory)


def _bytes_of_tensor(tensor: "torch.Tensor") -> Buffer:
    from torch import uint8

    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a contiguous tensor on the CPU is needed, not one on {tensor.device}")
    array: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(uint8).numpy()
    return array.data


def sizes_of(buffers: Sequence[Buffer]) -> list[int]:
    """Return the size of each buffer in bytes."""
    return [buffer.nbytes for buffer in buffers]
