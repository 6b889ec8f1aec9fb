"""Wraps the native library's thread that fetches blocks from host memory during a step (`stream.h`)."""

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.native.library import declare
from services.worker.kv.core.fetch_buffers import Blocks
from services.worker.kv.tiers.resident import BlockStream, OpenStream, StreamFigures, StreamWork


class _Memory(ctypes.Structure):
    """Memory layout as in `stream.h`. Holds addresses: the tensors must outlive it."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("key_bytes", ctypes.c_int64),
        ("value_bytes", ctypes.c_int64),
        ("layers", ctypes.c_int32),
        ("device_blocks", ctypes.c_int32),
    )


class _Step(ctypes.Structure):
    """Work of one step as in `stream.h`. Holds addresses: the arrays must live until the next step."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("kept", ctypes.c_int32),
        ("source", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p * 2),
        ("entries", ctypes.c_int32),
        ("at", ctypes.c_void_p),
        ("which", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("saves", ctypes.c_int32),
        ("save_from", ctypes.c_void_p),
        ("save_to", ctypes.c_void_p),
    )


class _Figures(ctypes.Structure):
    """Figures as in `stream.h`."""

    _fields_ = (
        ("stall_s", ctypes.c_double),
        ("fetch_s", ctypes.c_double),
        ("save_s", ctypes.c_double),
        ("stalls", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("early", ctypes.c_int64),
        ("fetched", ctypes.c_int64),
        ("saved", ctypes.c_int64),
    )


_STREAM = ctypes.c_void_p
_PROTOTYPES = {
    "stream_open": (_STREAM, (ctypes.POINTER(_Memory),)),
    "stream_close": (None, (_STREAM,)),
    "stream_pace": (None, (_STREAM, ctypes.c_double, ctypes.c_double)),
    "stream_begin": (None, (_STREAM, ctypes.POINTER(_Step))),
    "stream_enter": (ctypes.c_int32, (_STREAM, ctypes.c_int32, ctypes.c_double)),
    "stream_leave": (None, (_STREAM, ctypes.c_int32)),
    "stream_end": (ctypes.c_int32, (_STREAM,)),
    "stream_halt": (None, (_STREAM,)),
    "stream_figures": (None, (_STREAM, ctypes.POINTER(_Figures))),
    "stream_load": (None, (_STREAM, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)),
    "stream_save": (None, (_STREAM, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)),
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
        address = library.stream_open(
            _Memory(
                key=keys.data_ptr(),
                value=values.data_ptr(),
                host=rows.ctypes.data,
                key_bytes=keys[0].nbytes,
                value_bytes=values[0].nbytes,
                layers=layers,
                device_blocks=len(keys) // layers,
            )
        )
        self.address: int | None = int(address)
        self.tables: torch.Tensor | None = None
        self._at_work: tuple[object, ...] = ()
        """Keeps alive what the thread reads until the next step."""

    def pace(self, bytes_s: float) -> None:
        """See `BlockStream`."""
        self._library.stream_pace(self.address, bytes_s, bytes_s)

    def begin(self, work: StreamWork) -> None:
        """See `BlockStream`. Ends the fetches that the previous step made ahead."""
        step = _Step(
            count=len(work.fetched),
            kept=work.kept,
            source=work.fetched.ctypes.data,
            place=work.place.ctypes.data,
            buffer=(ctypes.c_void_p * 2)(work.even.ctypes.data, work.odd.ctypes.data),
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
        """See `BlockStream`."""
        return not self._library.stream_enter(self.address, layer, timeout_s)

    def leave(self, layer: int) -> None:
        """See `BlockStream`."""
        self._library.stream_leave(self.address, layer)

    def end(self) -> int:
        """See `BlockStream`. Fetches the first two layers again, for a next step with the same blocks."""
        return int(self._library.stream_end(self.address))

    def halt(self) -> None:
        """See `BlockStream`."""
        self._library.stream_halt(self.address)

    def figures(self) -> StreamFigures:
        found = _Figures()
        self._library.stream_figures(self.address, found)
        return StreamFigures(
            found.stall_s, found.fetch_s, found.save_s, found.layers, found.early, found.fetched, found.saved
        )

    def load(self, rows: Blocks, blocks: Blocks) -> None:
        """See `BlockStream`."""
        self._library.stream_load(self.address, rows.ctypes.data, blocks.ctypes.data, len(rows))

    def save(self, blocks: Blocks, rows: Blocks) -> None:
        """See `BlockStream`."""
        self._library.stream_save(self.address, blocks.ctypes.data, rows.ctypes.data, len(rows))

    def close(self) -> None:
        """End the thread. Call nothing after this."""
        self._library.stream_close(self.address)


def opener(library: ctypes.CDLL) -> OpenStream:
    """Return the function that opens streams of this library."""

    def open_stream(
        keys: torch.Tensor, values: torch.Tensor, rows: npt.NDArray[np.uint8], layers: int
    ) -> BlockStream:
        return NativeStream(library, keys, values, rows, layers)

    return open_stream
