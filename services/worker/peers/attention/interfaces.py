"""Interfaces of remote attention: a creditor's lent memory, and a borrower's access to borrowed blocks.

Two engines implement both: one that computes attention (`memory`, `debtor`), and one whose KV are the tokens
themselves (`tokens`). Knows no tensor, and no link's messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.worker.engine.partition import Homes
from services.worker.engine.spans import PackedSpans
from services.worker.kv.tiers.records import LayerPools
from services.worker.peers.attention.messages import NO_STEP, GrantRef
from services.worker.peers.attention.write_watch import WriteWatch
from services.worker.peers.transport.base import Buffer, PeerLink
from services.worker.peers.transport.pipe import Pipe
from shared.errors import CreditorLost, KvasirError, Overloaded
from shared.messages.lending import KvTier


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of answering a debtor's native steps for a while."""

    compute_s: float
    is_over: bool
    """The debtor has ended the exchange: messages follow."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request about one layer of a part."""

    layer: int
    q_heads: int
    scaling: float = 1.0
    softcap: float | None = None


class LentBlocks(Protocol):
    """Lent memory of one tier, all layers. Calls verify the blocks they access, and raise CorruptedKv."""

    @property
    def blocks(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def pools(self) -> LayerPools:
        """The memory itself, by layer."""
        ...

    @property
    def attends(self) -> bool:
        """Whether attention is computed here; else blocks are only written and fetched."""
        ...

    @property
    def is_native(self) -> bool:
        """Whether `serve` answers native steps."""
        ...

    def sizes_bytes(self, asked: Question, rows: int, kept: int) -> list[int]:
        """Return the sizes of a request's buffers: queries, if any, then keys and values to keep.

        Raises InvalidMessage for a request that does not fit these pools."""
        ...

    def write(
        self, asked: Question, brought: Sequence[npt.NDArray[np.uint8]], slots: npt.NDArray[np.int64]
    ) -> None:
        """Store the keys and values of a request's buffers."""
        ...

    def attend(
        self, asked: Question, spans: PackedSpans, brought: Sequence[npt.NDArray[np.uint8]]
    ) -> Sequence[Buffer]:
        """Return the answer's buffers."""
        ...

    def served_s(self, spans: PackedSpans, *, is_busy: bool) -> float:
        """Return simulated seconds of this attention, beyond the call itself; `is_busy`: with own steps."""
        ...

    def copy(self, layer: int, blocks: npt.NDArray[np.int32]) -> Sequence[Buffer]:
        """Return a consistent copy of blocks."""
        ...

    def verify(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        """Verify blocks before they are sent."""
        ...

    def adopt(self, blocks: npt.NDArray[np.int32], loans: npt.NDArray[np.int64]) -> None:
        """Record each block's grant, and drop the seals of earlier grants."""
        ...

    def serve(self, pipe: Pipe, lent: npt.NDArray[np.bool_], *, q_heads: int, is_full: bool) -> Turn:
        """See `exchange.serve`. Only where `is_native`."""
        ...


class BlockReader(Protocol):
    """Reads whole blocks of one creditor over a link of its own. For one thread at a time."""

    @property
    def link(self) -> PeerLink: ...

    def read(
        self, grants: Sequence[GrantRef], blocks: npt.NDArray[np.int32], rows: npt.NDArray[np.uint8]
    ) -> None:
        """Copy blocks into `rows` `[n, record_bytes]`, laid out as in `Records`. Raises KvasirError."""
        ...


@dataclass(slots=True)
class LentTier:
    """A creditor's memory of one tier, on the debtor's side."""

    link: PeerLink
    grants: tuple[GrantRef, ...]
    tier: KvTier
    attends: bool
    """The creditor computes attention; else blocks always travel."""


class BlockDebtor(ABC):
    """An engine's access to the workers that lend it blocks. On the engine's thread, except `reader`.

    `homes` maps ids to holders. `add` numbers holders from 1; a worker that lends from both tiers is two
    holders, each with a link of its own."""

    _lendings: dict[int, Any]
    """By holder: a `LentTier` or a subclass."""

    def __init__(self, own_blocks: int, block_tokens: int, most_creditors: int, deadline_s: float) -> None:
        """`deadline_s`: for an answer."""
        self.homes = Homes(own_blocks)
        self.watch = WriteWatch(block_tokens)
        self.block_tokens = block_tokens
        self.deadline_s = deadline_s
        self._most_creditors = most_creditors
        self._lendings = {}
        self._holders = 0
        self._numbers = count(NO_STEP + 1)
        """Numbers of steps."""

    def add(
        self,
        link: PeerLink,
        grants: Sequence[GrantRef],
        tier: KvTier = KvTier.DEVICE,
        *,
        attends: bool = True,
    ) -> int:
        """Enter a creditor's memory of one tier; return the holder's number for `homes.place`.

        `attends`: whether the creditor computes attention. Raises Overloaded when too many lend."""
        if len(self._lendings) >= self._most_creditors:
            raise Overloaded(f"{self._most_creditors} lend already")
        self._holders += 1
        self._lendings[self._holders] = self._lent(LentTier(link, tuple(grants), tier, attends))
        return self._holders

    @abstractmethod
    def _lent(self, what: LentTier) -> LentTier:
        """Return the entry to keep for a holder."""

    def set_grants(self, holder: int, grants: Sequence[GrantRef]) -> None:
        """Replace the grants of a holder."""
        self._lendings[holder].grants = tuple(grants)

    def remove(self, holder: int) -> None:
        """Remove a holder, whose ids must have been forgotten."""
        lending = self._lendings.pop(holder, None)
        if lending is not None:
            lending.link.close()

    def close(self) -> None:
        """Closes every link."""
        for lending in list(self._lendings.values()):
            lending.link.close()

    @abstractmethod
    def bring_home(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all layers of each pair's borrowed block into its own block, between two steps.

        The originals stay valid. Raises CreditorLost."""

    @abstractmethod
    def read(self, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        """Copy borrowed blocks, all layers, into `rows` `[n, record_bytes]`, laid out as in `Records`.

        Between two steps. Raises CreditorLost."""

    @abstractmethod
    def reader(self, link: PeerLink, tier: KvTier) -> BlockReader:
        """Return a reader for use beside the steps. Any thread may call it."""


def creditor_lost(link: PeerLink, error: KvasirError) -> CreditorLost:
    """Return the error for a step whose creditor failed at the other end of `link`."""
    creditor_id = link.peer.worker_id
    message = f"worker {creditor_id}, which lends KV, failed: {error.message}"
    return CreditorLost(message, creditor_id=creditor_id)
