"""Fetches blocks from the host during a step, on a GPU or without the native library.

`TorchStream` submits copies to lanes, which run in order per direction: on threads in RAM (`RamLanes`), on
CUDA streams on a GPU (`gpu/lanes.py`). As in `native/stream.h`, layer l goes to buffer l % 2 once layer l -
2 has attended.

A *part* is one layer's K and V of a block: at row * layers + layer in host memory, at layer * device_blocks
+ block on the device."""

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.native.stream import NativeStream
from services.worker.kv.core.fetch_buffers import Blocks
from services.worker.kv.tiers.resident import BlockStream, OpenStream, StreamFigures, StreamWork
from shared.errors import InternalError

if TYPE_CHECKING:
    from services.worker.engine.gpu.lanes import GpuLanes

Moment = Any
"""A point in the computation: seconds in RAM, an event on a GPU."""
Index = Any
"""int32 indices that copies read: an array in RAM, a tensor on a GPU."""
NO_FIGURES = StreamFigures(0.0, 0.0, 0.0, 0, 0, 0, 0)
_MOST_COPIES = 4096
"""Most copies queued at a time, and most kept for the figures."""


@dataclass(slots=True)
class _Fetch:
    """The copy of one layer to the device, for the figures."""

    ticket: Any
    blocks: int
    is_ahead: bool
    wanted: Moment | None = None
    """When the computation reached the layer."""
    left: Moment | None = None
    """When the previous layer had attended."""


class TorchStream:
    """Implements `BlockStream` over lanes, for use by one thread."""

    address: int | None = None

    def __init__(self, lanes: "RamLanes | GpuLanes", layers: int, device_blocks: int) -> None:
        self._lanes, self._layers, self._device_blocks = lanes, layers, device_blocks
        self._first, self._ahead = 0, 0
        """Index of layer 0's buffer; number of layers submitted for this step before it began."""
        self._left, self._is_over = layers, True
        """Number of layers that have attended; whether the step is over."""
        self._copies: list[tuple[Index, Index]] = []
        """Parts and places by layer, followed by those of the next step's first layers."""
        self._fetches: list[_Fetch] = []
        self._saves: list[Any] = []
        self._noted: deque[_Fetch] = deque(maxlen=_MOST_COPIES)
        self._noted_saves: deque[Any] = deque(maxlen=_MOST_COPIES)
        self._last: Any = None
        """Last copy to the device."""
        self._tables: Index = None
        self._at: Index = None
        self._buffers: tuple[Index, Index] = (None, None)
        self._figures = NO_FIGURES

    @property
    def tables(self) -> torch.Tensor | None:
        return self._tables if isinstance(self._tables, torch.Tensor) else None

    def pace(self, bytes_s: float) -> None:
        self._lanes.pace(bytes_s)

    def begin(self, work: StreamWork) -> None:
        lanes = self._lanes
        lanes.begin()
        self._left, self._is_over = 0, False
        self._fetches, self._copies, self._tables = [], [], None
        if len(work.save_from):
            parts, places = self._parts_of(work.save_to, work.save_from)
            self._saves.extend(lanes.take(places, parts, lambda: self._is_over))
        if len(work.fetched):
            self._start(work)

    def _start(self, work: StreamWork) -> None:
        """Upload the step's indices and submit the copies of the first two layers."""
        lanes = self._lanes
        copies = self._copies_of(work)
        pointed = [work.at, work.even[work.which], work.odd[work.which]]
        pieces = self._upload([*(each for pair in copies for each in pair), *pointed])
        self._copies = list(zip(pieces[: 2 * len(copies) : 2], pieces[1 : 2 * len(copies) : 2], strict=True))
        self._at, self._buffers = pieces[-3], (pieces[-2], pieces[-1])
        self._tables = lanes.tables(work.tables)
        self._bring(0)
        self._bring(1)

    def _upload(self, arrays: Sequence[Blocks]) -> list[Index]:
        """Upload several arrays in one copy."""
        flat = self._lanes.upload(np.concatenate(arrays))
        ends = np.cumsum([len(each) for each in arrays]).tolist()
        return [flat[end - len(each) : end] for each, end in zip(arrays, ends, strict=True)]

    def _copies_of(self, work: StreamWork) -> list[tuple[Blocks, Blocks]]:
        """Return parts and places by layer, followed by two layers of the next step."""
        layers, is_passing, found = self._layers, work.place < 0, []
        for layer in range(layers):
            buffers = (work.even, work.odd)[(self._first + layer) % 2]
            first = work.kept if layer < self._ahead else 0
            places = np.where(is_passing, buffers, work.place + layer * self._device_blocks)
            found.append(_as_int32(work.fetched[first:] * layers + layer, places[first:]))
        return [*found, *self._copies_ahead(work)]

    def _copies_ahead(self, work: StreamWork) -> list[tuple[Blocks, Blocks]]:
        """Return parts and places of buffered blocks, for the next step's first two layers."""
        is_passing, found = work.place < 0, []
        for layer in range(2):
            buffers = (work.even, work.odd)[(self._first + self._layers + layer) % 2]
            parts = work.fetched[is_passing] * self._layers + layer
            found.append(_as_int32(parts, buffers[is_passing]))
        return found

    def _bring(self, layer: int) -> None:
        self._fetch(*self._copies[layer], is_ahead=layer >= self._layers)

    def _fetch(self, parts: Index, places: Index, *, is_ahead: bool) -> None:
        ticket = self._last = self._lanes.bring(parts, places)
        fetch = _Fetch(ticket, len(places), is_ahead)
        self._noted.append(fetch)
        self._fetches.append(fetch)

    def enter(self, layer: int, timeout_s: float) -> bool:
        if not self._fetches:
            return True
        fetch = self._fetches[layer]
        fetch.wanted = self._lanes.moment()
        if not self._lanes.join(fetch.ticket, timeout_s):
            return False
        buffers = self._buffers[(self._first + layer) % 2]
        self._tables[self._at] = buffers - layer * self._device_blocks
        return True

    def leave(self, layer: int) -> None:
        self._left = layer + 1
        if self._fetches:
            self._fetches[layer + 1].left = self._lanes.moment()
            self._bring(layer + 2)

    def end(self) -> int:
        """See `BlockStream`. Waits until the step's copies in both directions are done."""
        has_failed = self._left < self._layers
        self._is_over = True
        self._lanes.hurry(all_of_it=has_failed)
        made = [ticket for ticket in self._saves if self._lanes.settle(ticket)]
        self._noted_saves.extend(made)
        self._saves = []
        if has_failed:
            self.halt()
        else:
            self._ahead = self._settle()
        self._first = (self._first + self._layers) % 2
        return sum(ticket.blocks for ticket in made)

    def _settle(self) -> int:
        """Wait for the step's fetches; return the number of layers fetched for the next step."""
        if not self._fetches:
            return 0
        self._lanes.settle(self._fetches[self._layers - 1].ticket)
        return 2

    def halt(self) -> None:
        self._lanes.hurry(all_of_it=True)
        if self._last is not None:
            self._lanes.settle(self._last)
        self._ahead = 0

    def figures(self) -> StreamFigures:
        """See `BlockStream`. Counts completed copies only."""
        between, found = self._lanes.between, asdict(self._figures)
        while self._noted and self._is_known(self._noted[0]):
            each = self._noted.popleft()
            found["fetch_s"] += between(each.ticket.began, each.ticket.ended)
            found["fetched"] += each.blocks
            found["layers"] += not each.is_ahead
            if each.wanted is not None:
                found["stall_s"] += max(0.0, between(each.wanted, each.ticket.ended))
            if each.left is not None and not each.is_ahead:
                found["early"] += between(each.ticket.ended, each.left) > 0
        while self._noted_saves:
            ticket = self._noted_saves.popleft()
            found["save_s"] += between(ticket.began, ticket.ended)
            found["saved"] += ticket.blocks
        self._figures = StreamFigures(**found)
        return self._figures

    def _is_known(self, fetch: _Fetch) -> bool:
        """Return whether all moments of a fetch are past."""
        moments = (fetch.ticket.began, fetch.ticket.ended, fetch.wanted, fetch.left)
        is_settled = fetch.is_ahead or self._is_over
        return is_settled and all(each is None or self._lanes.is_past(each) for each in moments)

    def load(self, rows: Blocks, blocks: Blocks) -> None:
        self._copy_now(rows, blocks, is_in=True)

    def save(self, blocks: Blocks, rows: Blocks) -> None:
        self._copy_now(rows, blocks, is_in=False)

    def _copy_now(self, rows: Blocks, blocks: Blocks, *, is_in: bool) -> None:
        parts, places = self._parts_of(rows, blocks)
        self._lanes.copy_now(parts.reshape(-1), places.reshape(-1), is_in=is_in)

    def _parts_of(self, rows: Blocks, blocks: Blocks) -> tuple[Blocks, Blocks]:
        """Return parts and places of whole blocks, both `[blocks, layers]`."""
        layers = np.arange(self._layers, dtype=np.int32)
        parts, places = rows[:, None] * self._layers + layers, blocks[:, None] + layers * self._device_blocks
        return parts.astype(np.int32), places.astype(np.int32)

    def close(self) -> None:
        self.halt()
        self._lanes.close()


def _as_int32(*numbers: npt.NDArray[Any]) -> Any:
    return tuple(each.astype(np.int32) for each in numbers)


class _RamTicket:
    """A copy by a thread. `ended` includes the simulated time of the link."""

    blocks = 1
    """Number of whole blocks that it copies to the host."""

    def __init__(self, copy: Callable[[], int]) -> None:
        """`copy` returns the number of bytes; below 0: the copy was skipped."""
        self.copy = copy
        self.began = self.ended = 0.0
        self.was_made = False
        self.failure: BaseException | None = None
        self.is_over = threading.Event()


class _Lane:
    """Copy queue of one direction, with a bandwidth limit; its thread starts with the first copy."""

    def __init__(self, name: str) -> None:
        self.bytes_s = 0.0
        self.is_hurried = threading.Event()
        self._name = name
        self._queue: queue.Queue[_RamTicket | None] = queue.Queue(_MOST_COPIES)
        self._thread: threading.Thread | None = None
        self._due_s = 0.0

    def submit(self, copy: Callable[[], int]) -> _RamTicket:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        ticket = _RamTicket(copy)
        self._queue.put_nowait(ticket)
        return ticket

    def close(self) -> None:
        self.is_hurried.set()
        if self._thread is not None:
            self._queue.put_nowait(None)
            self._thread.join()

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            ticket.began = perf_counter()
            try:
                sent = ticket.copy()
                ticket.was_made = sent >= 0
                self._wait_for_the_link(max(0, sent))
            except Exception as error:  # `settle` raises it
                ticket.failure = error
            ticket.ended = perf_counter()
            ticket.is_over.set()

    def _wait_for_the_link(self, sent: int) -> None:
        if not self.bytes_s:
            return
        self._due_s = max(self._due_s, perf_counter()) + sent / self.bytes_s
        while not self.is_hurried.is_set() and (left_s := self._due_s - perf_counter()) > 0:
            self.is_hurried.wait(left_s)


class RamLanes:
    """Lanes within RAM, with a thread for each direction.

    Lanes copy parts in parallel to the computation, in order per direction. Each copy starts after the
    computation that was submitted before it."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, rows: npt.NDArray[np.uint8], layers: int
    ) -> None:
        """`keys` and `values` `[layers * device_blocks, …]`, `rows` `[rows, bytes]`, all contiguous."""
        self._keys, self._values = (
            pool.view(len(pool), -1).view(torch.uint8).numpy() for pool in (keys, values)
        )
        self._parts = rows.reshape(len(rows) * layers, -1)
        self._key_bytes = self._keys.shape[1]
        self._in, self._out = _Lane("kv-in"), _Lane("kv-out")

    def upload(self, numbers: Blocks) -> Blocks:
        return numbers

    def tables(self, tables: Blocks) -> Blocks:
        """Return a step's block tables for the computation; `TorchStream` changes them for each layer."""
        return tables

    def bring(self, parts: Blocks, places: Blocks) -> _RamTicket:
        """Copy parts from the host to the device."""
        return self._in.submit(lambda: self._copy(parts, places, is_in=True))

    def take(self, places: Blocks, parts: Blocks, is_over: Callable[[], bool]) -> list[_RamTicket]:
        """Copy `[blocks, layers]` parts from the device to the host, unless the step `is_over` by then.

        Makes one copy per block, so that a step's end skips the rest."""
        return [self._take(*each, is_over) for each in zip(places, parts, strict=True)]

    def _take(self, places: Blocks, parts: Blocks, is_over: Callable[[], bool]) -> _RamTicket:
        return self._out.submit(lambda: -1 if is_over() else self._copy(parts, places, is_in=False))

    def copy_now(self, parts: Blocks, places: Blocks, *, is_in: bool) -> None:
        """Copy parts and return when that is done."""
        self._copy(parts, places, is_in=is_in)

    def _copy(self, parts: Blocks, places: Blocks, *, is_in: bool) -> int:
        """Copy parts and return the number of bytes."""
        keys, values, key_bytes = self._keys, self._values, self._key_bytes
        for part, place in zip(parts.tolist(), places.tolist(), strict=True):
            record = self._parts[part]
            if is_in:
                keys[place], values[place] = record[:key_bytes], record[key_bytes:]
            else:
                record[:key_bytes], record[key_bytes:] = keys[place], values[place]
        return len(parts) * int(self._parts.shape[1])

    def join(self, ticket: _RamTicket, timeout_s: float) -> bool:
        """Let the computation wait for the copy. Return False after the timeout."""
        return ticket.is_over.wait(timeout_s) and self.settle(ticket)

    def settle(self, ticket: _RamTicket) -> bool:
        """Wait for the copy and return whether it was made. Raises InternalError if it failed."""
        ticket.is_over.wait()
        if ticket.failure is not None:
            raise InternalError("KV could not be copied to or from host memory") from ticket.failure
        return ticket.was_made

    def moment(self) -> float:
        """Return the end of the computation that was submitted so far."""
        return perf_counter()

    def is_past(self, moment: float) -> bool:
        """Return whether a moment is past; the end of an unfinished copy is 0."""
        return moment > 0

    def between(self, earlier: float, later: float) -> float:
        """Return the seconds between two past moments; negative if `later` is the earlier one."""
        return later - earlier

    def pace(self, bytes_s: float) -> None:
        """Limit the bytes per second in each direction; 0: no limit. No effect on a GPU."""
        self._in.bytes_s = self._out.bytes_s = bytes_s

    def hurry(self, *, all_of_it: bool) -> None:
        """Lift the limit until the next step for copies to the host, or for all."""
        self._out.is_hurried.set()
        if all_of_it:
            self._in.is_hurried.set()

    def begin(self) -> None:
        """Begin a step."""
        self._out.is_hurried.clear()
        self._in.is_hurried.clear()

    def close(self) -> None:
        self._in.close()
        self._out.close()


def stream_opener(library: ctypes.CDLL | None, device: torch.device) -> OpenStream | None:
    """Return the function that opens streams on `device`; None on a GPU without Triton."""
    if library is not None:
        return partial(NativeStream, library)
    if device.type == "cpu":
        return _open_in_ram
    if find_spec("triton") is None:
        return None
    from services.worker.engine.gpu.streaming import open_on_gpu  # imports Triton

    return open_on_gpu


def _open_in_ram(
    keys: torch.Tensor, values: torch.Tensor, rows: npt.NDArray[np.uint8], layers: int
) -> BlockStream:
    return TorchStream(RamLanes(keys, values, rows, layers), layers, len(keys) // layers)
