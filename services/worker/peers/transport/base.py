"""What a bulk transport is: framed messages with raw buffers between two workers, request and reply.

The asking side dials a *link* and has it to itself: a link belongs to one thread at a time, blocks that
thread, and every call on it has a deadline. On an engine's thread call it directly; from asyncio use
`await asyncio.to_thread(link.ask, …)`. Who needs small quick questions and large transfers to one peer dials
two links. The answering side serves each link on a thread of its own and calls the *receiver* registered for
the kind of message there; a receiver computes on that thread, so it must be safe to be called from several.

    call = link.begin("attention", header, [bytes_of(q)], into=[bytes_of(o), bytes_of(lse)], deadline_s=0.05)
    ...                                   # own work, while the peer computes
    answer = call.finish()                # o and lse are filled

Rules, the same for every transport (`tests/services/worker/peers/transport/test_base.py`):

- Dialling takes a ticket: a secret that the answering worker issued for this peer, valid once and briefly.
- A receiver is asked first where the buffers belong (`admit`), is told that length and checksum agree
  (`commit`), or that they never will (`abandon`); nothing writes into its buffers after either of the two.
- Who gives up (deadline, error) aborts the link; a link that failed is closed and never used again. What was
  under way is abandoned at the other side: a peer that was only stopped and wakes up commits nothing.
- `into` and admitted buffers may be partly overwritten when a transfer fails. They are quarantine: use
  what is in them only after `finish` returned or `commit` was called.
- A transport allocates nothing in proportion to what a peer announces; sizes are checked before.

Knows neither blocks nor requests, nor what is in a header.
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
"""Contiguous bytes, one-dimensional, format `B`; writable where something is received into it.
`services.worker.peers.transport.base.bytes_of` makes one of a tensor or array, without copying."""

INLINE_BYTES = 64 << 10
"""Payloads up to this size travel with their envelope, whatever the transport. Only such may be begun while
other calls of the link are outstanding (their `into` may be larger): a larger one could wait for a peer that
waits for us."""


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Of one end. What exceeds them is refused before a byte of it is received."""

    header_bytes: int = 1 << 20
    buffers: int = 1 << 16
    message_bytes: int = 1 << 30
    links: int = 64
    """That may be open to one listener."""
    outstanding: int = 64
    """Calls begun on one link and not finished."""
    idle_s: float = 600.0
    """A link on which nobody asks for longer is closed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a link."""

    worker_id: str
    incarnation: int
    """The larger one is the one that lives."""


class Sequel(Protocol):
    """What goes over a link after a reply, before the next message, in a form of its own."""

    def run(self, pipe: "Pipe") -> None:
        """The reply was sent. On the link's thread, which waits for no longer than the two ends have agreed.
        Raises KvasirError: the link ends then."""
        ...

    def abandon(self) -> None:
        """It was not, and the link ends. Must not raise."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """Of a receiver. `header` is the receiver's own, MessagePack by convention."""

    header: bytes = b""
    buffers: Sequence[Buffer] = ()
    done: Callable[[], None] = field(default=lambda: None)
    """Called once, when `buffers` are no longer read: they were handed over, or never will be."""
    sequel: Sequel | None = None
    """One of both methods is called, once."""


class Reception(Protocol):
    """One incoming message that a receiver admitted."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """Quarantined memory, of exactly the announced sizes, in their order."""
        ...

    def commit(self) -> Reply:
        """Everything arrived intact and the peer still waits. A KvasirError goes to the peer as it is."""
        ...

    def abandon(self) -> None:
        """It did not, or nobody waits; nothing writes into the buffers any more. Must not raise."""
        ...


class Receiver(Protocol):
    """Whoever takes messages of one kind, at the answering end of a link."""

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        """Where the buffers belong. Raises KvasirError to refuse: it goes to the peer, nothing is stored."""
        ...


@dataclass(frozen=True, slots=True)
class PeerReply:
    """A peer's answer to a question."""

    header: bytes
    buffers: int
    """How many of `into` were filled, from the first."""


class Call(Protocol):
    """A question that was sent, and whose answer has not been read."""

    def finish(self) -> PeerReply:
        """Waits for the answer, until the deadline given to `begin`. Calls of one link are finished in the
        order they were begun, each once.

        Raises DeadlineExceeded; PeerLost; InvalidMessage when what arrived was corrupted or did not fit
        `into` (in these three cases the link is closed); or the KvasirError of the peer's receiver."""
        ...


class PeerLink(Protocol):
    """To one peer, by one transport. One thread at a time."""

    @property
    def peer(self) -> Peer: ...

    @property
    def transport(self) -> str: ...

    @property
    def closed(self) -> bool:
        """By us, by an error, or by the peer as far as is known: no call succeeds any more."""
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
        """Sends; `buffers` may be reused when it returns, `into` belongs to the call until it is finished.

        The answer has at most as many buffers as `into`, each exactly as large as the one it goes to.
        Raises DeadlineExceeded and PeerLost (the link is closed), MessageTooLarge and Overloaded
        (nothing was sent; see `TransportLimits`, `INLINE_BYTES`)."""
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
        """For what follows a reply. Whatever goes wrong there ends the link: close it."""
        ...

    def close(self) -> None:
        """Aborts what is under way; idempotent, and the one method that other threads may call."""
        ...


def bytes_of(memory: "torch.Tensor | npt.NDArray[Any] | bytearray | bytes | memoryview") -> Buffer:
    """Its bytes, in place. Raises ValueError when it is not contiguous or not in the CPU's memory."""
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
    """Bytes of each."""
    return [buffer.nbytes for buffer in buffers]
