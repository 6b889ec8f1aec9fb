"""Wraps the native library's thread that fetches blocks from host memory during a step (`stream.h`)."""

import ctypes
import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.native.library import ADDRESS, DOUBLE, INT32, INT64, declare, fields
from services.worker.kv.core.fetch_buffers import Blocks
from services.worker.kv.tiers.resident import StreamFigures, StreamWork


class _Memory(ctypes.Structure):
    """Memory layout as in `stream.h`. Holds addresses: the tensors must outlive it."""

    _fields_ = fields(
        (ADDRESS, "key value host"), (INT64, "key_bytes value_bytes"), (INT32, "layers device_blocks")
    )


class _Step(ctypes.Structure):
    """Work of one step as in `stream.h`. Holds addresses: the arrays must live until the next step."""

    _fields_ = fields(
        (INT32, "count kept"),
        (ADDRESS, "source place"),
        (ADDRESS * 2, "buffer"),
        (INT32, "entries"),
        (ADDRESS, "at which blocks"),
        (INT32, "saves"),
        (ADDRESS, "save_from save_to"),
    )


class _Figures(ctypes.Structure):
    """Figures as in `stream.h`."""

    _fields_ = fields((DOUBLE, "stall_s fetch_s save_s"), (INT64, "stalls layers early fetched saved"))


_PROTOTYPES = {
    "stream_open": (ADDRESS, (ctypes.POINTER(_Memory),)),
    "stream_close": (None, (ADDRESS,)),
    "stream_pace": (None, (ADDRESS, DOUBLE, DOUBLE)),
    "stream_begin": (None, (ADDRESS, ctypes.POINTER(_Step))),
    "stream_enter": (INT32, (ADDRESS, INT32, DOUBLE)),
    "stream_leave": (None, (ADDRESS, INT32)),
    "stream_end": (INT32, (ADDRESS,)),
    "stream_halt": (None, (ADDRESS,)),
    "stream_figures": (None, (ADDRESS, ctypes.POINTER(_Figures))),
    "stream_load": (None, (ADDRESS, ADDRESS, ADDRESS, INT32)),
    "stream_save": (None, (ADDRESS, ADDRESS, ADDRESS, INT32)),
}


class NativeStream:
    """Implements `BlockStream` between tensors in host memory."""

    def __init__(
        self,
        library: ctypes.CDLL,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: npt.NDArray[np.uint8],
        layers: int,
    ) -> None:
        """`keys` and `values` `[layers * device_blocks, …]`, contiguous; `rows` `[ids, record bytes]`."""
        declare(library, _PROTOTYPES)
        self._library = library
        self._memory = keys, values, rows
        """Keeps the tensors alive for the thread."""
        sizes = keys[0].nbytes, values[0].nbytes, layers, len(keys) // layers
        memory = _Memory(keys.data_ptr(), values.data_ptr(), rows.ctypes.data, *sizes)
        address = library.stream_open(memory)
        self.address: int | None = int(address)
        self.tables: torch.Tensor | None = None
        self._at_work: tuple[object, ...] = ()
        """Keeps alive what the thread reads until the next step."""

    def pace(self, bytes_s: float) -> None:
        self._library.stream_pace(self.address, bytes_s, bytes_s)

    def begin(self, work: StreamWork) -> None:
        """See `BlockStream`. Ends the fetches that the previous step made ahead."""
        step = _Step(
            count=len(work.fetched),
            kept=work.kept,
            source=work.fetched.ctypes.data,
            place=work.place.ctypes.data,
            buffer=(ADDRESS * 2)(work.even.ctypes.data, work.odd.ctypes.data),
            entries=len(work.at),
            at=work.at.ctypes.data,
            which=work.which.ctypes.data,
            blocks=work.tables.ctypes.data,
            saves=len(work.save_from),
            save_from=work.save_from.ctypes.data,
            save_to=work.save_to.ctypes.data,
        )
        self._library.stream_begin(self.address, step)
        self._at_work = step, work

    def enter(self, layer: int, timeout_s: float) -> bool:
        return not self._library.stream_enter(self.address, layer, timeout_s)

    def leave(self, layer: int) -> None:
        self._library.stream_leave(self.address, layer)

    def end(self) -> int:
        """See `BlockStream`. Fetches the first two layers again, for a next step with the same blocks."""
        return int(self._library.stream_end(self.address))

    def halt(self) -> None:
        self._library.stream_halt(self.address)

    def figures(self) -> StreamFigures:
        found = _Figures()
        self._library.stream_figures(self.address, found)
        return StreamFigures(*(getattr(found, each.name) for each in dataclasses.fields(StreamFigures)))

    def load(self, rows: Blocks, blocks: Blocks) -> None:
        self._library.stream_load(self.address, rows.ctypes.data, blocks.ctypes.data, len(rows))

    def save(self, blocks: Blocks, rows: Blocks) -> None:
        self._library.stream_save(self.address, blocks.ctypes.data, rows.ctypes.data, len(rows))

    def close(self) -> None:
        """End the thread. Call nothing after this."""
        self._library.stream_close(self.address)
