"""What a creditor asks of the memory that it lends, and a borrower of who gets at what it has borrowed.

Two engines have both: one that computes attention (`memory`, `debtor`), and one whose KV are the tokens
themselves (`tokens`). Knows no tensor and no link's messages.
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
    """What came of a while in which a debtor's steps were answered natively."""

    compute_s: float
    is_over: bool
    """The debtor has ended the exchange: messages follow. Else steps may."""


@dataclass(frozen=True, slots=True)
class Question:
    """What travels with the description of a part, for one layer."""

    layer: int
    q_heads: int
    scaling: float = 1.0
    softcap: float | None = None


class LentBlocks(Protocol):
    """All layers' memory of one tier. Blocks are verified before they are read or written to: then calls
    raise CorruptedKv."""

    @property
    def blocks(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def pools(self) -> LayerPools:
        """In the memory of the host, where it is host memory."""
        ...

    @property
    def attends(self) -> bool:
        """Questions are computed; else blocks are only written and fetched."""
        ...

    @property
    def is_native(self) -> bool:
        """`serve` answers steps."""
        ...

    def sizes_bytes(self, asked: Question, rows: int, kept: int) -> list[int]:
        """Of the buffers that come with a question: queries, where there are heads of them, and what the
        creditor keeps. Raises InvalidMessage for a question that does not fit these pools."""
        ...

    def write(
        self, asked: Question, brought: Sequence[npt.NDArray[np.uint8]], slots: npt.NDArray[np.int64]
    ) -> None:
        """What it keeps of the buffers."""
        ...

    def attend(
        self, asked: Question, spans: PackedSpans, brought: Sequence[npt.NDArray[np.uint8]]
    ) -> Sequence[Buffer]:
        """The answer's buffers."""
        ...

    def served_s(self, spans: PackedSpans, *, is_busy: bool) -> float:
        """What attending to these takes beside the time of the call: of a simulated engine's steps, which
        `is_busy` with its own."""
        ...

    def copy(self, layer: int, blocks: npt.NDArray[np.int32]) -> Sequence[Buffer]:
        """Of one moment."""
        ...

    def verify(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        """Before these are sent."""
        ...

    def adopt(self, blocks: npt.NDArray[np.int32], loans: npt.NDArray[np.int64]) -> None:
        """Each block is lent by that grant: what was written under another one is no concern of anybody."""
        ...

    def serve(self, pipe: Pipe, lent: npt.NDArray[np.bool_], *, q_heads: int, is_full: bool) -> Turn:
        """See `exchange.serve`; where it `is_native`."""
        ...


class BlockReader(Protocol):
    """Gets whole blocks of one creditor's memory, over a link of its own. For one thread at a time."""

    @property
    def link(self) -> PeerLink: ...

    def read(
        self, grants: Sequence[GrantRef], blocks: npt.NDArray[np.int32], rows: npt.NDArray[np.uint8]
    ) -> None:
        """Into `rows` `[n, record_bytes]`, as `Records` has them. Raises KvasirError."""
        ...


@dataclass(slots=True)
class LentTier:
    """A creditor's memory of one tier, as its debtor knows it."""

    link: PeerLink
    grants: tuple[GrantRef, ...]
    tier: KvTier
    attends: bool
    """It computes there; else blocks travel, whatever that costs."""


class BlockDebtor(ABC):
    """An engine's way to the workers that lend it blocks. On the engine's thread, but for `reader`.

    `homes` says which ids are whose; holders are numbered from 1 by `add`, and a worker that lends of both
    tiers is two, each with a link of its own."""

    _lendings: dict[int, Any]
    """By holder: a `LentTier`, and what else this way has to know of it."""

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
        """Of steps."""

    def add(
        self,
        link: PeerLink,
        grants: Sequence[GrantRef],
        tier: KvTier = KvTier.DEVICE,
        *,
        attends: bool = True,
    ) -> int:
        """A creditor's memory of one tier, over a link of its own: the holder's number for `homes.place`.

        `attends`: whether it computes there. Raises Overloaded when there are many.
        """
        if len(self._lendings) >= self._most_creditors:
            raise Overloaded(f"{self._most_creditors} lend already")
        self._holders += 1
        self._lendings[self._holders] = self._lent(LentTier(link, tuple(grants), tier, attends))
        return self._holders

    @abstractmethod
    def _lent(self, what: LentTier) -> LentTier:
        """With what else is known of it."""

    def set_grants(self, holder: int, grants: Sequence[GrantRef]) -> None:
        """It lends more, or less."""
        self._lendings[holder].grants = tuple(grants)

    def remove(self, holder: int) -> None:
        """It lends nothing more. Its ids must have been forgotten."""
        lending = self._lendings.pop(holder, None)
        if lending is not None:
            lending.link.close()

    def close(self) -> None:
        """Closes every link."""
        for lending in list(self._lendings.values()):
            lending.link.close()

    @abstractmethod
    def bring_home(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: of each pair the first, a borrowed id, into the second, an own one.

        What a recall needs; between two steps. The originals stay as they are. Raises CreditorLost.
        """

    @abstractmethod
    def read(self, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        """Copy whole borrowed blocks, all layers, into `rows` `[n, record_bytes]`, as `Records` has them.

        Between two steps. Raises CreditorLost.
        """

    @abstractmethod
    def reader(self, link: PeerLink, tier: KvTier) -> BlockReader:
        """Beside the steps. Any thread may call this."""


def creditor_lost(link: PeerLink, error: KvasirError) -> CreditorLost:
    """What a step is told when whatever went wrong with the creditor at the end of that link."""
    creditor_id = link.peer.worker_id
    message = f"worker {creditor_id}, which lends KV, failed: {error.message}"
    return CreditorLost(message, creditor_id=creditor_id)
