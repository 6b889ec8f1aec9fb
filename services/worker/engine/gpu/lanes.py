"""Copy lanes of a CUDA device: a CUDA stream per direction, synchronised with the computation by events.

One kernel copies many scattered blocks from and to page-locked host memory. Source: papers/004 §3.3."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.gpu.attention import launch
from services.worker.engine.gpu.kernels import copy_parts_kernel
from services.worker.engine.gpu.spans import TABLE_END
from services.worker.kv.core.fetch_buffers import Blocks

COPY_PROGRAMS = 16
"""Programs of one copy: enough concurrent reads for any link; the other multiprocessors compute."""
COPY_LANES = 1024
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class _GpuTicket:
    """Start and end events of a copy."""

    began: Any
    ended: Any
    blocks: int = 0


class GpuLanes:
    """As `stream.RamLanes`, which has the docs; `cuda` is `torch.cuda` or a stand-in."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: npt.NDArray[np.uint8],
        layers: int,
        *,
        cuda: ModuleType | Any = torch.cuda,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`keys` and `values` `[layers * device_blocks, …]`, `rows` `[rows, bytes]`, all contiguous.

        `close` calls `release`."""
        self.device, self.cuda, self._release = keys.device, cuda, release
        self._in, self._out = cuda.Stream(self.device), cuda.Stream(self.device)
        key_bytes, value_bytes = keys[0].nbytes, values[0].nbytes
        word = _WORDS[math.gcd(key_bytes, value_bytes, 8)]
        self.rows = len(rows)
        host = torch.from_numpy(rows.reshape(len(rows) * layers, -1))
        self.memory = host.view(word), *(pool.view(len(pool), -1).view(word) for pool in (keys, values))
        self.words = key_bytes // word.itemsize, value_bytes // word.itemsize

    def upload(self, numbers: Blocks) -> torch.Tensor:
        """Copies asynchronously, in order with the computation."""
        pinned = torch.from_numpy(numbers)
        if self.device.type == "cuda":
            pinned = pinned.pin_memory()
        uploaded = pinned.to(self.device, non_blocking=True)
        for stream in (self._in, self._out):  # keeps the memory allocated while copies read it
            if self.device.type == "cuda":
                uploaded.record_stream(stream)
        return uploaded

    def tables(self, tables: Blocks) -> torch.Tensor:
        """Appends `spans.TABLE_END`, which the kernels need."""
        return self.upload(np.concatenate([tables, TABLE_END]))

    def bring(self, parts: torch.Tensor, places: torch.Tensor) -> _GpuTicket:
        return self._submit(self._in, parts, places, is_in=True)

    def take(self, places: Blocks, parts: Blocks, is_over: Callable[[], bool]) -> list[_GpuTicket]:
        """Makes a single copy; the step cannot be over when it is submitted."""
        flat = self.upload(np.concatenate([parts.reshape(-1), places.reshape(-1)]))
        halves = flat[: parts.size], flat[parts.size :]
        return [self._submit(self._out, *halves, is_in=False, blocks=len(places))]

    def _submit(
        self, stream: Any, parts: torch.Tensor, places: torch.Tensor, *, is_in: bool, blocks: int = 0
    ) -> _GpuTicket:
        stream.wait_event(self.moment())
        began, ended = (self.cuda.Event(enable_timing=True) for _ in range(2))
        ticket = _GpuTicket(began, ended, blocks)
        with self.cuda.stream(stream):
            ticket.began.record(stream)
            self._copy(parts, places, is_in=is_in)
            ticket.ended.record(stream)
        return ticket

    @contextmanager
    def inwards(self) -> Iterator[Any]:
        """Launch the kernels inside on the inbound stream, after the computation submitted so far.

        Yields the event of their end, without timing, so that a graph can contain it."""
        reached, ended = self.cuda.Event(), self.cuda.Event()
        reached.record(self.cuda.current_stream(self.device))
        self._in.wait_event(reached)
        with self.cuda.stream(self._in):
            yield ended
            ended.record(self._in)

    def copy_now(self, parts: Blocks, places: Blocks, *, is_in: bool) -> None:
        self._copy(self.upload(parts), self.upload(places), is_in=is_in)
        self.cuda.current_stream(self.device).synchronize()

    def _copy(self, parts: torch.Tensor, places: torch.Tensor, *, is_in: bool) -> None:
        key_words, value_words = self.words
        launch(
            copy_parts_kernel,
            (COPY_PROGRAMS if len(parts) else 0,),
            (parts, places, *self.memory, len(parts)),
            KEY_WORDS=key_words,
            VALUE_WORDS=value_words,
            LANES=COPY_LANES,
            PROGRAMS=COPY_PROGRAMS,
            IS_IN=is_in,
            num_warps=8,
        )

    def join(self, ticket: _GpuTicket, timeout_s: float) -> bool:
        """Only the device waits."""
        self.cuda.current_stream(self.device).wait_event(ticket.ended)
        return True

    def settle(self, ticket: _GpuTicket) -> bool:
        ticket.ended.synchronize()
        return True

    def moment(self) -> Any:
        event = self.cuda.Event(enable_timing=True)
        event.record(self.cuda.current_stream(self.device))
        return event

    def is_past(self, moment: Any) -> bool:
        return bool(moment.query())

    def between(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def _nothing(self, *_: object, **__: object) -> None:
        """There is no limit to set."""

    pace = hurry = begin = _nothing

    def close(self) -> None:
        self._release()
