"""One creditor's share of a step, on the debtor's side: queries go there, or blocks come here.

Either way, keys and values for the creditor are on their way before the next layer begins. Knows one link and
one part; `debtor` chooses the way. Source: Infinite-LLM §4.6 (papers/001).
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.engine.attention import PagedAttention
from services.worker.engine.backends import PartialBackend, Pools
from services.worker.engine.paged import Shape, dims_of
from services.worker.engine.partition import ELSEWHERE, Part
from services.worker.engine.remote import Partial
from services.worker.engine.spans import PackedSpans
from services.worker.peers.attention.core.cost import CreditorSpeeds, Work
from services.worker.peers.attention.exchange import Asker
from services.worker.peers.attention.interfaces import LentTier
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    NATIVE,
    NO_STEP,
    WRITE,
    GrantRef,
    Request,
    read_answer,
    request_encoder,
    to_wire,
)
from services.worker.peers.transport.base import Buffer, bytes_of
from services.worker.peers.transport.link import Call
from shared.clock import Clock


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of a part's tables in the staging, the fetched ones first."""

    fetched: npt.NDArray[np.int32]
    """Indices of the part's blocks to fetch, in staging order."""
    spans: PackedSpans
    """The part, with tables and slots in the staging."""


def cut(spans: PackedSpans, block_tokens: int, most_blocks: int, *, refetch: bool = False) -> list[Segment]:
    """Cut a part into segments of at most `most_blocks`. `refetch`: fetch this step's own blocks too.

    Attention reads one half of the staging while the other fills. With 2 blocks in each half, a part with a
    table of 5 blocks, the last of which this step makes:

        segments:  [0 1]     [2 3]     [4]
        fetched:    0 1       2 3       none: this step makes every key of block 4
        staged in:  half 0    half 1    half 0
    """
    total = len(spans.blocks)
    of_block = {int(block): index for index, block in enumerate(spans.blocks)}
    kept = spans.slots != ELSEWHERE
    home = np.full(len(spans.slots), ELSEWHERE, dtype=np.int64)
    home[kept] = [of_block[int(slot) // block_tokens] for slot in spans.slots[kept]]
    offset = spans.slots % block_tokens
    is_fresh = np.zeros(total, dtype=bool)
    if not refetch:
        is_fresh[home[kept & (offset == 0)]] = True
    start, blocks = spans.table_start, -(-spans.key_end // block_tokens)

    def segment(first: int, end: int) -> Segment:
        inside = np.arange(first, end, dtype=np.int32)
        fetched = inside[~is_fresh[first:end]]
        staged = np.empty(end - first, dtype=np.int32)
        staged[np.concatenate([fetched, inside[is_fresh[first:end]]]) - first] = inside - first
        low, high = np.maximum(start, first), np.minimum(start + blocks, end)
        is_seen, there = high > low, (home >= first) & (home < end)
        slots = np.full(len(home), ELSEWHERE, dtype=np.int64)
        slots[there] = staged[home[there] - first].astype(np.int64) * block_tokens + offset[there]
        key_end = np.where(is_seen, np.minimum(spans.key_end, (high - start) * block_tokens), 0)
        placed = replace(
            spans,
            table_start=np.where(is_seen, low - first, 0).astype(np.int32),
            table_position=np.where(is_seen, (low - start) * block_tokens, 0).astype(np.int32),
            key_end=key_end.astype(np.int32),
            blocks=staged,
            slots=slots,
        )
        return Segment(fetched, placed)

    return [segment(first, min(first + most_blocks, total)) for first in range(0, total, most_blocks)]


def pairs(spans: PackedSpans) -> int:
    """Return the number of pairs of a row and a key that it sees."""
    rows = np.diff(spans.first_row).astype(np.int64)
    first, end = spans.first_position.astype(np.int64) + 1, spans.key_end.astype(np.int64)
    if spans.window_tokens:  # Each row is a span.
        return int((np.minimum(first, end) - np.maximum(0, first - spans.window_tokens)).clip(0).sum())
    rising = np.minimum(rows, np.maximum(0, end - first))
    return int((rising * first + rising * (rising - 1) // 2 + (rows - rising) * end).clip(0).sum())


HALVES = 2


class Staging:
    """Memory for fetched blocks of one layer: two halves of `blocks`, large enough for the largest layer."""

    def __init__(self, attention: PagedAttention, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"staging of {blocks} blocks holds nothing")
        self.blocks = blocks
        shapes = [(k.shape[1:], v.shape[1:]) for k, v in attention.pools]
        dtype = attention.pools[0][0].dtype
        widest = max(math.prod(k) + math.prod(v) for k, v in shapes)
        self.nbytes = HALVES * blocks * widest * dtype.itemsize
        self.pools: list[list[Pools]] = []
        """By half and layer. All layers of a half share its memory."""
        self.backends: list[PartialBackend] = []
        for _ in range(HALVES):
            memory = torch.zeros(blocks * widest, dtype=dtype)
            pools = [_view(memory, blocks, k, v) for k, v in shapes]
            self.pools.append(pools)
            self.backends.append(attention.partial_backend(pools))


def _view(memory: torch.Tensor, blocks: int, k_shape: Sequence[int], v_shape: Sequence[int]) -> Pools:
    k_size, v_size = blocks * math.prod(k_shape), blocks * math.prod(v_shape)
    return memory[:k_size].view(blocks, *k_shape), memory[k_size : k_size + v_size].view(blocks, *v_shape)


LayerInputs = tuple[Tensor, Tensor, Tensor, Shape]
"""Queries, keys and values `[rows, heads, dim]` of a layer, with all rows of the step."""


@dataclass(slots=True)
class CreditorMemory(LentTier):
    """A `LentTier` with its measured speeds, its staging, and the state of a native exchange."""

    speeds: CreditorSpeeds
    staging: Staging
    deadline_s: float
    """Deadline for one layer's answer."""
    is_native: bool = True
    """The creditor is not known to refuse native steps."""
    is_exchanging: bool = False
    """The exchange has the link: steps may begin at once."""
    _announced: Call | None = None
    _asker: Asker | None = None
    _known: tuple[GrantRef, ...] = ()
    """Grants of the announcement."""

    def announce(self, library: ctypes.CDLL, q_heads: int) -> None:
        """Announce native steps under the current grants. Raises KvasirError."""
        if self._known != self.grants:
            self.leave()
        if not self.is_exchanging and self._announced is None:
            self._known = self.grants
            header = Request(step=NO_STEP, layer=0, grants=self.grants, tier=self.tier, q_heads=q_heads)
            encoded = request_encoder.encode(header)
            self._announced = self.link.begin(NATIVE, encoded, deadline_s=self.deadline_s)
            self._asker = Asker(library, self.link.pipe, self.deadline_s)

    def exchange(self) -> Asker | None:
        """Return the asker, after `announce`; None when the creditor refuses. Raises KvasirError.

        It refuses forever, which clears `is_native`, or until its time budget recovers."""
        if self._announced is not None:
            call, self._announced = self._announced, None
            answer = read_answer(call.finish().header)
            self.is_exchanging = answer.is_native
            self.is_native = answer.is_native or answer.over_budget
        return self._asker if self.is_exchanging else None

    def leave(self) -> None:
        """End the exchange, if any: messages follow on the link. Raises KvasirError."""
        asker = self.exchange()
        if asker is not None:
            self.is_exchanging = False
            asker.stop()


class StepShare:
    """A step's number and part. The first message describes the part."""

    def __init__(self, lending: CreditorMemory, part: Part, step: int, clock: Clock) -> None:
        self.lending = lending
        self.part = part
        self.step = step
        self.clock = clock
        self.rows = torch.from_numpy(part.rows)
        self.kept = torch.from_numpy(part.rows[part.kept])
        self.pairs = pairs(part.spans)
        self._is_told = False

    def begin(
        self, kind: str, request: Request, buffers: Sequence[Buffer] = (), into: Sequence[Buffer] = ()
    ) -> Call:
        """Send a message about the part. Raises KvasirError, as `PeerLink.begin`."""
        self.lending.leave()
        if not self._is_told or self.step == NO_STEP:
            request = msgspec.structs.replace(request, part=to_wire(self.part.spans))
            self._is_told = True
        header = request_encoder.encode(request)
        deadline_s = self.lending.deadline_s
        return self.lending.link.begin(kind, header, buffers, into=into, deadline_s=deadline_s)

    def request(self, layer: int) -> Request:
        lending = self.lending
        return Request(step=self.step, layer=layer, grants=lending.grants, tier=lending.tier)


class ShippedShare:
    """A share that the creditor computes: one message and one answer for all rows of a layer."""

    def __init__(self, share: StepShare) -> None:
        self._share = share
        self._output = torch.empty(0, 0, 0)
        self._lse = torch.empty(0, 0)
        self._call: Call | None = None
        self._sent_s = 0.0
        self._sent_bytes = 0

    def send(self, layer: int, given: LayerInputs) -> None:
        share, (queries, keys, values, shape) = self._share, given
        size = (len(share.rows), queries.shape[1], values.shape[2])
        if self._output.shape != size:
            self._output, self._lse = torch.empty(size), torch.empty(size[:2])
        request = msgspec.structs.replace(
            share.request(layer), q_heads=queries.shape[1], scaling=shape.scaling, softcap=shape.softcap
        )
        buffers = _floats(queries[share.rows], keys[share.kept], values[share.kept])
        self._sent_s, self._sent_bytes = share.clock(), sum(each.nbytes for each in buffers)
        into = (bytes_of(self._output), bytes_of(self._lse))
        self._call = share.begin(ATTEND, request, buffers, into)

    def collect(self) -> Partial | None:
        """Return the partial result; None when the creditor's time is used up: fetch instead."""
        assert self._call is not None
        call, self._call = self._call, None
        share = self._share
        answer = call.finish()
        attended = read_answer(answer.header)
        if attended.over_budget or answer.buffers != 2:
            return None
        moved_bytes = self._sent_bytes + self._output.nbytes + self._lse.nbytes
        work = Work(ship_bytes=moved_bytes, fetch_bytes=0, pairs=share.pairs * self._output.shape[1])
        share.lending.speeds.on_shipped(work, share.clock() - self._sent_s, attended.compute_s)
        return share.rows, self._output, self._lse

    def drain(self) -> None:
        """Read and drop the answer under way. Raises KvasirError."""
        if self._call is not None:
            call, self._call = self._call, None
            call.finish()


class NativeShare:
    """A share that the creditor computes natively, without either interpreter."""

    def __init__(self, share: StepShare, asker: Asker) -> None:
        """Begin the step. Raises KvasirError."""
        self._share = share
        self._asker = asker
        self._work = Work(0, 0, 0)
        self._sent_s = 0.0
        self._is_asked = False
        self._is_over = False
        asker.begin(share.part)

    def send(self, layer: int, given: LayerInputs) -> None:
        self._sent_s = self._share.clock()
        self._asker.ask(layer, *given)
        self._is_asked = True
        self._work = Work(self._asker.moved_bytes, 0, self._share.pairs * given[0].shape[1])

    def collect(self) -> Partial | None:
        """Return the partial result; None when the creditor's time is used up, and nothing was written."""
        self._is_asked = False
        answer = self._asker.take()
        if answer is None:
            self._is_over = True
            return None
        output, lse, compute_s = answer
        share = self._share
        share.lending.speeds.on_shipped(self._work, share.clock() - self._sent_s, compute_s)
        return share.rows, output, lse

    def end(self) -> None:
        """Mark the step as complete."""
        self._is_over = True

    def drain(self) -> None:
        """Give up the rest of the step. Raises KvasirError."""
        if self._is_asked:
            self.collect()
        if not self._is_over:
            self._is_over = True
            self._asker.give_up()


class FetchedShare:
    """A share that the debtor computes over fetched blocks in its staging, fetched a layer ahead."""

    def __init__(self, share: StepShare, block_tokens: int, layers: int) -> None:
        """`layers`: of the model if all have this part; 0 if parts differ: nothing is fetched ahead."""
        self._share = share
        self._staging = share.lending.staging
        self._block_tokens = block_tokens
        self._layers = layers
        self._segments = cut(share.part.spans, block_tokens, self._staging.blocks)
        self._fetches: dict[int, Call | None] = {}
        """Fetches of the current or next layer by segment; None: nothing to fetch."""
        self._write: Call | None = None
        self._given: LayerInputs | None = None

    def send(self, layer: int, given: LayerInputs) -> None:
        """Keep the tensors; fetch the first segment if no earlier layer did."""
        self._given = given
        if not self._fetches:
            self._fetch(self._segments, 0, layer)

    def collect(self, layer: int) -> Iterator[Partial]:
        assert self._given is not None
        yield from self._attend(self._segments, layer, self._given)
        _, keys, values, _ = self._given
        kept = self._share.kept
        new = _floats(keys[kept], values[kept]) if len(kept) else []
        fetches = layer + 1 < self._layers and bool(len(self._segments[0].fetched))
        if new and not fetches:
            self._write = self._share.begin(WRITE, self._share.request(layer), new)
        if layer + 1 < self._layers:
            self._fetch(self._segments, 0, layer + 1, new if fetches else ())
        elif not self._layers:
            self.end()  # The next layer's part may need the link.

    def attend_again(self, layer: int, given: LayerInputs) -> Iterator[Partial]:
        """Attend to a layer whose keys and values the creditor wrote without computing."""
        segments = cut(self._share.part.spans, self._block_tokens, self._staging.blocks, refetch=True)
        self._fetch(segments, 0, layer)
        yield from self._attend(segments, layer, given)
        if layer + 1 < self._layers:
            self._fetch(self._segments, 0, layer + 1)

    def drain(self) -> None:
        """Read and drop the answers under way. Raises KvasirError."""
        self.end()
        for call in self._fetches.values():
            if call is not None:
                call.finish()
        self._fetches.clear()

    def end(self) -> None:
        """Wait until written keys and values have arrived. Raises KvasirError."""
        if self._write is not None:
            call, self._write = self._write, None
            call.finish()

    def _attend(self, segments: Sequence[Segment], layer: int, given: LayerInputs) -> Iterator[Partial]:
        share = self._share
        queries, keys, values = (each[share.rows] for each in given[:3])
        for index, segment in enumerate(segments):
            self._arrive(index, segment, layer)
            if index + 1 < len(segments):
                self._fetch(segments, index + 1, layer)
            began_s = share.clock()
            backend = self._staging.backends[index % HALVES]
            backend.write(layer, keys, values, torch.from_numpy(segment.spans.slots))
            output, lse = backend.attend_part(layer, segment.spans, queries, given[3])
            elapsed_s = share.clock() - began_s
            share.lending.speeds.on_attended(pairs(segment.spans) * queries.shape[1], elapsed_s)
            yield share.rows, output, lse

    def _fetch(self, segments: Sequence[Segment], index: int, layer: int, new: Sequence[Buffer] = ()) -> None:
        """Fetch a segment. `new`: keys and values of the previous layer to send along."""
        segment = segments[index]
        if not len(segment.fetched):
            self._fetches[index] = None
            return
        request = msgspec.structs.replace(
            self._share.request(layer),
            indices=segment.fetched.tobytes(),
            write_layer=layer - 1 if new else -1,
        )
        into = _front(self._staging.pools[index % HALVES][layer], len(segment.fetched))
        self._fetches[index] = self._share.begin(FETCH, request, new, into)

    def _arrive(self, index: int, segment: Segment, layer: int) -> None:
        """Wait until the segment's blocks are in the staging, and earlier writes at the creditor."""
        self.end()
        call = self._fetches.pop(index)
        if call is None:
            return
        began_s = self._share.clock()
        call.finish()
        if index:  # The first arrives during a layer's other work.
            fetched = _front(self._staging.pools[0][layer], len(segment.fetched))
            fetched_bytes = sum(each.nbytes for each in fetched)
            self._share.lending.speeds.on_fetched(fetched_bytes, self._share.clock() - began_s)


def _front(pools: Pools, blocks: int) -> list[Buffer]:
    return [bytes_of(pool[:blocks]) for pool in pools]


def _floats(*rows: Tensor) -> list[Buffer]:
    return [bytes_of(each.float().contiguous()) for each in rows]


def work_of(share: StepShare, *, q_heads: int, pools: Pools, block_tokens: int) -> Work:
    """Return the bytes and pairs of one layer, for both ways."""
    k_pool, v_pool = pools
    rows, kept = len(share.rows), len(share.kept)
    shipped = rows * q_heads * (sum(dims_of(pools)) + 1) * np.dtype(np.float32).itemsize
    context_blocks = max(0, share.part.seen_keys - kept // block_tokens)
    block_bytes = (k_pool[0].numel() + v_pool[0].numel()) * k_pool.dtype.itemsize
    return Work(ship_bytes=shipped, fetch_bytes=context_blocks * block_bytes, pairs=share.pairs * q_heads)
