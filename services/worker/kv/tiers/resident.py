"""A worker's KV on the device and in its own host memory: steps and copies find a block wherever it is.

The shell around `residency`: it holds the bytes, has whole blocks moved between steps, and hands what each
step reads from outside to a `BlockStream`, which brings it in behind the computation. The engine's thread
calls all of it but `records`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.core.block_pool import BlockPool, RowShare
from services.worker.kv.core.fetch_buffers import Blocks
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.kv.core.residency import Residency, StepPlan
from services.worker.kv.tiers.records import LayerPool, RecordRow, Records, records_of
from shared.errors import InternalError

_PROFILED_BLOCKS = 32
"""Copied to time them: not one alone, which would stay in the processor's caches."""


@dataclass(frozen=True, slots=True)
class StreamWork:
    """The blocks that one step reads from outside and saves there (`native/stream.h`); int32 arrays."""

    fetched: Blocks
    """Rows of host memory."""
    kept: int
    """Number of leading ones that were in the same buffers for the last step."""
    place: Blocks
    """Device block where each stays; -1: it goes through its buffers."""
    even: Blocks
    odd: Blocks
    """Places of the two buffers of each, counted through the device's blocks layer by layer."""
    at: Blocks
    """Entries of `tables` for blocks in buffers."""
    which: Blocks
    """Index into `fetched` of each such entry."""
    tables: Blocks
    """Tables of the step, whose entries are set before each layer attends."""
    save_from: Blocks
    """Device blocks copied out to the rows `save_to`."""
    save_to: Blocks


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Sums since the start."""

    stall_s: float
    """Time that the computation waited."""
    fetch_s: float
    save_s: float
    layers: int
    """Number of layers copied in."""
    early: int
    """Number of these that were there before the preceding layer had attended."""
    fetched: int
    """Blocks of one layer."""
    saved: int
    """Blocks of all layers."""


class BlockStream(Protocol):
    """Who copies blocks between the device and host memory, behind the computation."""

    @property
    def address(self) -> int | None:
        """For native code; None: none can wait for it."""
        ...

    @property
    def tables(self) -> torch.Tensor | None:
        """The present step's on the device, which `enter` changes; None: those of its work alone."""
        ...

    def pace(self, bytes_s: float) -> None:
        """In each direction; 0: as fast as memory."""
        ...

    def begin(self, work: StreamWork) -> None:
        """A step: its first layers are brought in."""
        ...

    def enter(self, layer: int, timeout_s: float) -> bool:
        """The layer is to attend: True when its blocks are there and the tables say where."""
        ...

    def leave(self, layer: int) -> None:
        """It has attended."""
        ...

    def end(self) -> int:
        """The step is over, or has failed; how many of its saves, from the first on, were made."""
        ...

    def halt(self) -> None:
        """Nothing is under way on return."""
        ...

    def figures(self) -> StreamFigures: ...

    def load(self, rows: Blocks, blocks: Blocks) -> None:
        """Whole blocks, at once: rows of host memory to blocks of the device."""
        ...

    def save(self, blocks: Blocks, rows: Blocks) -> None:
        """Whole blocks, at once: blocks of the device to rows of host memory."""
        ...

    def close(self) -> None: ...


OpenStream = Callable[[torch.Tensor, torch.Tensor, npt.NDArray[np.uint8], int], BlockStream]
"""K and V of all layers, host memory `[rows, bytes]`, layers → who copies between them."""


class ResidentKv:
    """`keys` `[layers * device_blocks, …]` and `values` likewise, contiguous: the device's blocks layer by
    layer. `ids` blocks there may be, `rows` of host memory for those outside, and in one with them
    `host_blocks` of a prefix cache. What a step waits for longer than `timeout_s` is an InternalError."""

    def __init__(
        self,
        open_stream: OpenStream,
        keys: torch.Tensor,
        values: torch.Tensor,
        layers: int,
        ids: int,
        *,
        rows: int,
        host_blocks: int = 0,
        timeout_s: float,
    ) -> None:
        device_blocks = len(keys) // layers
        share = RowShare(BlockPool(rows + host_blocks, 1), rows)
        self.residency = Residency(device_blocks, ids, layers, self._move, threading.RLock(), share)
        self.layers = layers
        self._timeout_s = timeout_s
        self.arena = keys, values
        """K and V of all layers."""
        key_bytes, value_bytes = (pool[0].nbytes for pool in (keys, values))
        self.layer_block_bytes = key_bytes + value_bytes
        size = rows + host_blocks, layers * self.layer_block_bytes
        self.rows: npt.NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        """Host memory; touched when first used."""
        self.stream = open_stream(keys, values, self.rows, layers)
        self._plan: StepPlan | None = None
        """Plan of the present step, if it has one."""
        self.is_streaming = False
        """A step is under way of which anything lies outside, or is saved meanwhile."""
        self._has_pool = False
        self._unpooled: tuple[int, ...] = ()
        """Blocks that steps used before there was a pool, to warm up."""

    @property
    def stream_of_step(self) -> tuple[int | None, float]:
        """The address of what native code waits for in the present step, None where there is nothing, and the
        time that a layer may wait."""
        return (self.stream.address if self.is_streaming else None), self._timeout_s

    def tables(self) -> torch.Tensor | None:
        """The present step's on the device, where they change from layer to layer."""
        return self.stream.tables if self.is_streaming else None

    def pace(self, bytes_s: float, background_bytes_s: float = 0.0) -> None:
        """Set the link's speed in each direction, 0: as fast as memory, and the part that others use."""
        left_s = max(bytes_s - background_bytes_s, bytes_s / 50)
        self.stream.pace(left_s)

    def profile(self) -> float:
        """Seconds that one layer's block takes from the host, at the start, when nothing is in any; not
        paced."""
        count = min(_PROFILED_BLOCKS, self.residency.device_blocks, len(self.rows))
        self.rows[:count] = 0  # Pages are there before the clock runs.
        some, took_s = np.arange(count, dtype=np.int32), []
        for _ in range(3):
            began_s = perf_counter()
            self.stream.load(some, some)
            took_s.append(perf_counter() - began_s)
        return min(took_s) / (count * self.layers)

    def make_pool(self, total_blocks: int, block_tokens: int) -> GrownPool:
        """The only one, with so many blocks to begin with. What steps used before is free in it."""
        self.residency.give(self._unpooled)
        self._has_pool, self._unpooled = True, ()
        return GrownPool(total_blocks, block_tokens, self.residency)

    def locate(self, blocks: Blocks, written: Blocks) -> Blocks:
        """A step begins, which reads `blocks` and writes to some of them: where they are for it. Ids that are
        not this worker's own are left as they are. What lies outside has a number above the device's until
        `point`. Raises ValueError as `Residency.plan` does."""
        residency = self.residency
        if residency.is_plain:
            return blocks
        own = blocks[blocks < residency.ids] if blocks.size and int(blocks.max()) >= residency.ids else blocks
        if not self._has_pool:
            self._unpooled = (*self._unpooled, *residency.take_new(np.unique(own).tolist()))
        plan = residency.plan(own, written[written < residency.ids])
        self._plan = plan
        if own is blocks:
            return residency.codes[blocks]
        return np.where(blocks < residency.ids, residency.codes.take(blocks, mode="clip"), blocks)

    def point(self, tables: Blocks) -> None:
        """The tables that the step attends with: they are made to point at what was brought in, by layer."""
        residency, plan = self.residency, self._plan
        if plan is None or not (len(plan.fetched) or len(plan.saves)):
            return
        first = residency.device_blocks
        at = np.flatnonzero((tables >= first) & (tables < first + len(plan.fetched))).astype(np.int32)
        even, odd = (residency.buffers.arena(plan.buffer, parity) for parity in (0, 1))
        which = tables[at] - first
        fetched = plan.fetched_from, plan.kept, plan.place, even, odd
        self.stream.begin(StreamWork(*fetched, at, which, tables, plan.save_from, plan.save_to))
        self.is_streaming = True

    def enter(self, layer: int) -> None:
        """The layer is to attend: the tables say where its blocks are. Raises InternalError."""
        if self.is_streaming and not self.stream.enter(layer, self._timeout_s):
            raise InternalError(
                f"KV of layer {layer} did not arrive from the host within {self._timeout_s:g} s"
            )

    def leave(self, layer: int) -> None:
        """The layer has attended."""
        if self.is_streaming:
            self.stream.leave(layer)

    def end(self, *, is_complete: bool) -> None:
        """The step is over; unless it `is_complete` it has failed, wherever that was."""
        if self._plan is None:
            return
        saved = self.stream.end() if self.is_streaming else 0
        self.residency.end(saved, is_complete=is_complete)
        self._plan, self.is_streaming = None, False

    def figures(self) -> StreamFigures:
        return self.stream.figures()

    def set_buffers(self, device_blocks: int, *, at_once: bool = False) -> bool:
        """Use so many of the device's blocks for buffers, between two steps. False while it cannot have them:
        `at_once` copies of what makes room for them are waited for."""
        if device_blocks > self.residency.spare_blocks:
            return self.residency.reserve(device_blocks, at_once=at_once)
        if device_blocks < self.residency.spare_blocks:
            self.stream.halt()
            self.residency.release(device_blocks)
        return True

    def records(self) -> "ResidentRecords":
        """Whole blocks as rows of bytes, wherever they are, for one thread."""
        return ResidentRecords(self)

    def pools(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """By layer: the device's blocks."""
        (keys, values), blocks = self.arena, self.residency.device_blocks
        spans = [slice(first, first + blocks) for first in range(0, self.layers * blocks, blocks)]
        return [(keys[span], values[span]) for span in spans]

    def close(self) -> None:
        """Ends the thread; nothing may be called any more."""
        self.stream.close()

    def _move(self, plan: StepPlan) -> None:
        """Copy before a step, in this thread: out first, which makes room."""
        if len(plan.saved_from):
            self.stream.save(plan.saved_from, plan.saved_to)
        if len(plan.loaded_from):
            self.stream.load(plan.loaded_from, plan.loaded_to)


_BLOCKS_AT_ONCE = 8
"""Between two of its own copies the engine waits for no more than these."""


class ResidentRecords(Records):
    """`Records` of blocks that may be outside. A few are copied at once, while no place changes."""

    def __init__(self, kv: ResidentKv, on_device: Records | None = None) -> None:
        self._kv = kv
        self._on_device = on_device or records_of(kv.pools())
        super().__init__(kv.pools())

    @property
    def host_rows(self) -> npt.NDArray[np.uint8]:
        return self._kv.rows

    def twin(self) -> "ResidentRecords":
        return ResidentRecords(self._kv, self._on_device.twin())

    def _rows(self, pool: LayerPool) -> Any:
        return self._on_device._rows(pool)

    def read(self, blocks: Sequence[int], rows: Sequence[RecordRow]) -> None:
        for some in _few(blocks, rows):
            with self._kv.residency.lock:
                slots, there, outside = self._apart(some)
                for row, host_row in outside:
                    row[:] = host_row
                if slots:
                    self._on_device.read(slots, there)

    def write(self, rows: Sequence[RecordRow], blocks: Sequence[int]) -> None:
        for some in _few(blocks, rows):
            with self._kv.residency.lock:
                slots, there, outside = self._apart(some)
                for row, host_row in outside:
                    host_row[:] = row
                if slots:
                    self._on_device.write(there, slots)
                for block, _ in some:
                    self._kv.residency.on_written(block)

    def _apart(
        self, some: Sequence[tuple[int, RecordRow]]
    ) -> tuple[list[int], list[RecordRow], list[tuple[RecordRow, RecordRow]]]:
        """Slots of those that are on the device, and their rows; rows of the others, with where they lie."""
        residency = self._kv.residency
        slots: list[int] = []
        there: list[RecordRow] = []
        outside: list[tuple[RecordRow, RecordRow]] = []
        for block, row in some:
            slot = residency.slot_of(block)
            if slot is None:
                outside.append((row, self._kv.rows[residency.row_of(block)]))
            else:
                slots.append(slot)
                there.append(row)
        return slots, there, outside


def _few(blocks: Sequence[int], rows: Sequence[RecordRow]) -> Iterator[Sequence[tuple[int, RecordRow]]]:
    pairs = list(zip(blocks, rows, strict=True))
    for first in range(0, len(pairs), _BLOCKS_AT_ONCE):
        yield pairs[first : first + _BLOCKS_AT_ONCE]
