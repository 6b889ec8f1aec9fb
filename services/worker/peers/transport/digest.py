"""The digest that verifies a payload: weighted sums over its rows and columns, or CRC-32 for short payloads.

CRC-32 would halve a transport's speed. These sums run at memory speed, in C++, or in numpy where there is no
library. A slice of up to 512 KiB is a table with 1,024 words a row. Each row and each column has an odd
weight, so any single wrong word changes both sums, and so do words that are swapped, repeated or zeroed,
unless errors cancel out in rows and columns alike. The digest finds faults, not forgeries.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from services.worker.engine.native.build import build
from services.worker.peers.transport.base import Buffer
from shared.errors import ConfigError

_Words = npt.NDArray[np.uint64]

SLICE_BYTES = 1 << 19
"""Buffers are sent, received and verified in slices that fit a core's cache."""
_MOST_VIEWS = 256
_ROW_WORDS = 1024
"""Many more columns than rows: numpy adds a row at a time."""
_ROW_BYTES = 8 * _ROW_WORDS
_CRC_BELOW_BYTES = 4 * _ROW_BYTES
_MASK = (1 << 64) - 1
_FOLD = 0x9E3779B97F4A7C15


def _weights(count: int, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return odd 64-bit numbers (SplitMix64)."""
    found = []
    for step in range(1, count + 1):
        mixed = (seed + step * _FOLD) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(mixed ^ (mixed >> 31) | 1)
    return np.array(found, dtype=np.uint64)


_ROW_WEIGHTS = _weights(SLICE_BYTES // _ROW_BYTES, 1)
_COLUMN_WEIGHTS = _weights(_ROW_WORDS, 2)


def _cut(sizes_bytes: Iterable[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield pieces of buffers (number, start, end) in groups of at most 512 KiB."""
    group: list[tuple[int, int, int]] = []
    room_bytes = SLICE_BYTES
    for number, size_bytes in enumerate(sizes_bytes):
        start = 0
        while start < size_bytes:
            end = min(size_bytes, start + room_bytes)
            group.append((number, start, end))
            room_bytes -= end - start
            start = end
            if not room_bytes or len(group) == _MOST_VIEWS:
                yield group
                group, room_bytes = [], SLICE_BYTES
    if group:
        yield group


def slices(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Yield the buffers in order, in groups of at most 512 KiB. Both ends cut alike."""
    for group in _cut(buffer.nbytes for buffer in buffers):
        yield [buffers[number][start:end] for number, start, end in group]


def sizes_as_slices(sizes_bytes: Iterable[int], scratch: Buffer) -> Iterator[list[Buffer]]:
    """Yield like `slices` for buffers of these sizes, but with views of `scratch` only."""
    for group in _cut(sizes_bytes):
        yield [scratch[: end - start] for _, start, end in group]


class PayloadDigest:
    """Digest of a message, fed with its slices in order."""

    def __init__(self) -> None:
        self.value = 0
        """128 bits: sums of rows in the lower half, of columns in the upper. Either half shows any single
        wrong word."""

    def packed(self) -> bytes:
        """Return the digest as the 16 bytes that follow a payload."""
        return self.value.to_bytes(16, "little")

    def update(self, group: Sequence[Buffer]) -> None:
        rows, columns = self.value & _MASK, self.value >> 64
        for view in group:
            by_row, by_column = _of(view)
            rows = ((rows ^ by_row) * _FOLD + view.nbytes) & _MASK
            columns = ((columns ^ by_column) * _FOLD) & _MASK
        self.value = rows | columns << 64


def digest(buffers: Sequence[Buffer]) -> bytes:
    """Return the digest of a whole payload, packed."""
    made = PayloadDigest()
    for group in slices(buffers):
        made.update(group)
    return made.packed()


def _of(view: Buffer) -> tuple[int, int]:
    if view.nbytes < _CRC_BELOW_BYTES:
        crc = zlib.crc32(view)
        return crc, crc
    rows = view.nbytes // _ROW_BYTES
    by_row, by_column = _sums()(np.frombuffer(view, dtype=np.uint64, count=rows * _ROW_WORDS), rows)
    rest = zlib.crc32(view[rows * _ROW_BYTES :])
    return by_row ^ rest, by_column ^ rest << 32


def sums_in_numpy(words: _Words, rows: int) -> tuple[int, int]:
    """Return the sum of the rows, and of the columns."""
    table = words.reshape(rows, _ROW_WORDS)
    by_row = int(np.add.reduce(table, axis=1).dot(_ROW_WEIGHTS[:rows]))
    return by_row, int(np.add.reduce(table, axis=0).dot(_COLUMN_WEIGHTS))


@cache
def _sums() -> Callable[[_Words, int], tuple[int, int]]:
    try:
        library = ctypes.CDLL(str(build()))
    except (ConfigError, OSError):
        return sums_in_numpy
    pointer, wide = ctypes.c_void_p, ctypes.c_int64
    library.table_sums.argtypes = (pointer, wide, wide, pointer, pointer, pointer, pointer)
    library.table_sums.restype = None
    weights = _ROW_WEIGHTS.ctypes.data, _COLUMN_WEIGHTS.ctypes.data

    def sums(words: _Words, rows: int) -> tuple[int, int]:
        found = (ctypes.c_uint64 * 2)()
        at = ctypes.addressof(found)
        library.table_sums(words.ctypes.data, rows, _ROW_WORDS, *weights, at, at + 8)
        return found[0], found[1]

    return sums
