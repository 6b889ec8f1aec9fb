"""Interfaces of remote attention: a creditor's lent memory, and a debtor's access to borrowed blocks.

Two engines implement both: one that computes attention (`memory`, `debtor`), and one whose KV are the tokens
themselves (`tokens`). Knows no tensor, and no link's messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.engine.partition import ELSEWHERE, Homes, Part, whole
from services.worker.engine.spans import PackedSpans
from services.worker.kv.tiers.records import LayerPools, records_of
from services.worker.peers.attention.messages import (
    FETCH,
    NO_STEP,
    GrantRef,
    Request,
    request_encoder,
    to_wire,
)
from services.worker.peers.transport.base import Buffer, bytes_of
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.pipe import Pipe
from shared.errors import CreditorLost, InternalError, KvasirError, Overloaded
from shared.messages.lending import KvTier

T = TypeVar("T")
_FETCHED_BLOCKS = 8
"""Maximum number of blocks in one fetched message."""
Brought = Sequence[npt.NDArray[np.uint8]]
"""Buffers of a request."""
Place = tuple[int, int]
"""A holder, and a block there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of answering a debtor's native steps for a while."""

    compute_s: float
    is_over: bool
    """The debtor has ended the exchange: messages follow."""


class LentBlocks(ABC):
    """Lent memory of one tier, all layers. Calls verify the blocks they access, and raise CorruptedKv."""

    pools: LayerPools
    """The memory itself, by layer."""
    attends: bool
    """Attention is computed here; else blocks are only written and fetched."""

    @property
    @abstractmethod
    def blocks(self) -> int: ...

    @property
    def layers(self) -> int:
        return len(self.pools)

    @property
    def is_native(self) -> bool:
        """Whether `serve` answers native steps."""
        return False

    @abstractmethod
    def sizes_bytes(self, asked: Request, rows: int, kept: int) -> list[int]:
        """Return the sizes of a request's buffers: queries, if any, then keys and values to keep.

        Raises InvalidMessage for a request that does not fit these pools."""

    @abstractmethod
    def write(self, asked: Request, brought: Brought, slots: npt.NDArray[np.int64]) -> None:
        """Store the keys and values of a request's buffers."""

    @abstractmethod
    def attend(self, asked: Request, spans: PackedSpans, brought: Brought) -> Sequence[Buffer]:
        """Return the answer's buffers."""

    @abstractmethod
    def copy(self, layer: int, blocks: npt.NDArray[np.int32]) -> Sequence[Buffer]:
        """Return a consistent copy of blocks."""

    def served_s(self, spans: PackedSpans, *, is_busy: bool) -> float:
        """Return simulated seconds of this attention, beyond the call itself; `is_busy`: with own steps."""
        return 0.0

    def verify(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:  # noqa: B027
        """Verify blocks before they are sent."""

    def adopt(self, blocks: npt.NDArray[np.int32], loans: npt.NDArray[np.int64]) -> None:  # noqa: B027
        """Record each block's grant, and drop the seals of earlier grants."""

    def serve(self, pipe: Pipe, lent: npt.NDArray[np.bool_], *, q_heads: int, is_full: bool) -> Turn:
        """See `exchange.serve`. Only where `is_native`."""
        raise InternalError("this memory is lent without native turns")


class WriteWatch:
    """Writes of one debtor to borrowed blocks while they are copied home: its latest round of copies."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._copies: dict[Place, int] = {}

    def restart(self, copies: Mapping[Place, int]) -> None:
        """Start a round: own blocks by the place copied into them."""
        self._copies = dict(copies)

    def discard(self, own: Iterable[int]) -> None:
        """Forget copies that did not arrive."""
        missed = set(own)
        self._copies = {place: block for place, block in self._copies.items() if block not in missed}

    def is_copy(self, place: Place, own: int) -> bool:
        """Return whether the own block is a current copy of the place."""
        return self._copies.get(place) == own

    def on_step(self, parts: Sequence[Part]) -> None:
        """Drop the copies of blocks that a step writes to."""
        if not self._copies:
            return
        for part in parts:
            slots = part.spans.slots
            for block in np.unique(slots[slots != ELSEWHERE] // self._block_tokens).tolist():
                self._copies.pop((part.holder, block), None)


@dataclass(slots=True)
class LentTier:
    """A creditor's memory of one tier, on the debtor's side."""

    link: PeerLink
    grants: tuple[GrantRef, ...]
    tier: KvTier
    attends: bool
    """The creditor computes attention; else blocks always travel."""

    def leave(self) -> None:
        """End a native exchange on the link, if any: messages follow. Raises KvasirError."""


class BlockDebtor(ABC):
    """An engine's access to the workers that lend it blocks. On the engine's thread, unless noted.

    `homes` maps ids to holders. `add` numbers holders from 1; a worker that lends from both tiers is two
    holders, each with a link of its own."""

    _lendings: dict[int, Any]
    """By holder: a `LentTier` or a subclass."""

    def __init__(
        self, pools: LayerPools, own_blocks: int, block_tokens: int, most_creditors: int, deadline_s: float
    ) -> None:
        """`pools`: the engine's; `deadline_s`: for an answer."""
        self._sizes_bytes = [[int(pool[0].nbytes) for pool in layer] for layer in pools]
        """Sizes of a block in the pools of each layer."""
        self._records = records_of(pools)
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

    def _lent(self, lender: LentTier) -> LentTier:
        """Return the entry to keep for a holder."""
        return lender

    def set_grants(self, holder: int, grants: Sequence[GrantRef]) -> None:
        """Replace the grants of a holder."""
        self._lendings[holder].grants = tuple(grants)

    def remove(self, holder: int) -> None:
        """Remove a holder, whose ids must have been forgotten."""
        self._lendings.pop(holder).link.close()

    def close(self) -> None:
        """Close every link."""
        for lending in list(self._lendings.values()):
            lending.link.close()

    def bring_home(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all layers of each pair's borrowed block into its own block, between two steps.

        The originals stay valid. Raises CreditorLost."""
        rows = np.empty((len(pairs), self._records.record_bytes), dtype=np.uint8)
        self.read([there for there, _ in pairs], rows)
        self._records.write(list(rows), [own for _, own in pairs])

    def read(self, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        """Copy borrowed blocks, all layers, into `rows` `[n, record_bytes]`, laid out as in `Records`.

        Between two steps. Raises CreditorLost."""
        holders, there = self.homes.locate(blocks)
        for holder in np.unique(holders).tolist():
            at, lender = np.flatnonzero(holders == holder), self._lendings[holder]
            found = np.empty((len(at), rows.shape[1]), dtype=np.uint8)
            self._guarded(lender.link, partial(self.fetch, lender, there[at], found))
            rows[at] = found

    def fetch(self, lender: LentTier, blocks: npt.NDArray[np.int32], rows: npt.NDArray[np.uint8]) -> None:
        """`read` for blocks of one lender. Any thread may call it, beside the steps for a link of its own.
        Raises KvasirError."""
        lender.leave()
        for first in range(0, len(blocks), _FETCHED_BLOCKS):
            some = blocks[first : first + _FETCHED_BLOCKS]
            # `NO_STEP`: the creditor remembers only a few parts, and a running step needs its own remembered.
            request = Request(
                step=NO_STEP,
                layer=0,
                grants=lender.grants,
                tier=lender.tier,
                part=to_wire(whole(0, some, self.block_tokens).spans),
                indices=np.arange(len(some), dtype=np.int32).tobytes(),
            )
            parts = self._records.parts_of(rows[first : first + len(some)])
            for layer, sizes in enumerate(self._sizes_bytes):
                into = [np.empty((len(some), size), dtype=np.uint8) for size in sizes]
                header = request_encoder.encode(msgspec.structs.replace(request, layer=layer))
                buffers = [bytes_of(each) for each in into]
                lender.link.ask(FETCH, header, into=buffers, deadline_s=self.deadline_s)
                for arrived, part in zip(into, parts, strict=False):
                    part[:] = arrived

    @abstractmethod
    def abandon(self) -> None:
        """End the step that failed. Reads the answers under way, so that links stay usable."""

    def _guarded(self, link: PeerLink, call: Callable[[], T]) -> T:
        """Turn a creditor's error into CreditorLost, and close its link."""
        try:
            return call()
        except KvasirError as error:
            link.close()
            self.abandon()
            creditor_id = link.peer.worker_id
            message = f"worker {creditor_id}, which lends KV, failed: {error.message}"
            raise CreditorLost(message, creditor_id=creditor_id) from error
