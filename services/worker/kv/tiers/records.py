"""Copies whole blocks from the per-layer pools to contiguous records, and back.

A record holds one block over all layers: for each layer the bytes of K, then those of V, as they lie in the
pools. Calls return when the bytes are there; each object is for one thread at a time. Knows no slot
and no file."""

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from shared.blocks import BlockHash

DONT_NEED, _POPULATE_WRITE = 4, 23
"""Linux' `MADV_DONTNEED` and, from 5.14 on, `MADV_POPULATE_WRITE`."""
RecordRow = npt.NDArray[np.uint8]
"""One record, `[record_bytes]`."""
LayerPool: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
LayerPools: TypeAlias = "Sequence[tuple[torch.Tensor, ...]] | Sequence[tuple[npt.NDArray[Any], ...]]"
"""By layer, natively: K `[num_blocks, kv_heads, head_dim, block_tokens]`, V `[num_blocks, kv_heads,
block_tokens, value_dim]`. With other engines what they have, each contiguous and with the blocks first."""


class Records:
    """The pools of one engine as rows of bytes, for one thread at a time."""

    def __init__(self, pools: LayerPools) -> None:
        """Raises ValueError when a pool is not contiguous or the pools differ in blocks or device."""
        self._pools = pools
        self._parts = [self._rows(pool) for pool in _flat(pools)]
        self._ends: list[int] = np.cumsum([part.shape[1] for part in self._parts]).tolist()
        self._starts = [0, *self._ends[:-1]]
        self.record_bytes: int = self._ends[-1]

    @property
    def host_rows(self) -> npt.NDArray[np.uint8] | None:
        """Host memory `[n, record_bytes]` in which blocks in use may lie; None: there is none."""
        return None

    def twin(self) -> "Records":
        """Return the same pools for another thread, whose copies do not wait for the engine's kernels."""
        return type(self)(self._pools)

    def read(self, blocks: Sequence[int], rows: Sequence[RecordRow]) -> None:
        """Copy blocks to rows, both of one length."""
        for part, start, end in zip(self._parts, self._starts, self._ends, strict=True):
            for block, row in zip(blocks, rows, strict=True):
                row[start:end] = part[block]

    def write(self, rows: Sequence[RecordRow], blocks: Sequence[int]) -> None:
        """Copy rows to blocks, both of one length."""
        for part, start, end in zip(self._parts, self._starts, self._ends, strict=True):
            for block, row in zip(blocks, rows, strict=True):
                part[block] = row[start:end]

    def make_ready(self, blocks: int) -> None:
        """Have the memory of the first blocks there, bytes as they are: faults take longer than copies."""
        for part in self._parts:
            if isinstance(part, np.ndarray):  # a GPU's is there
                advise(part[:blocks], _POPULATE_WRITE)

    def give_back(self) -> None:
        """Return the pools' memory to the system until it is written: all blocks read as zeros."""
        for part in self._parts:
            if isinstance(part, np.ndarray):
                advise(part, DONT_NEED)

    def parts_of(self, rows: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
        """Iterate over each layer's K, then V, `[n, bytes]` of records `[n, record_bytes]`."""
        for start, end in zip(self._starts, self._ends, strict=True):
            yield rows[:, start:end]

    def _rows(self, pool: LayerPool) -> Any:
        """Return a pool as `[num_blocks, bytes of a block]`, in place."""
        if isinstance(pool, np.ndarray):
            return pool.reshape(len(pool), -1).view(np.uint8)
        from torch import uint8  # there already, where a tensor is

        return pool.view(len(pool), -1).view(uint8).numpy()


def advise(part: npt.NDArray[np.uint8], advice: int) -> None:
    """Call Linux' `madvise` for the whole pages of contiguous memory."""
    page, first = mmap.PAGESIZE, part.ctypes.data
    first, end = -(-first // page) * page, (first + part.nbytes) // page * page
    if end > first and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def records_of(pools: LayerPools) -> Records:
    """Return the records of pools on any device. Raises ValueError as `Records` does."""
    if _device(_flat(pools)[0]).startswith("cuda"):
        from services.worker.kv.tiers.gpu_records import GpuRecords

        return GpuRecords(pools)
    return Records(pools)


def _flat(pools: LayerPools) -> list[LayerPool]:
    flat = [pool for layer in pools for pool in layer]
    if not flat or len({(len(pool), _device(pool)) for pool in flat}) != 1:
        raise ValueError("pools need the same number of blocks on one device")
    if not all(_is_contiguous(pool) for pool in flat):
        raise ValueError("pools have to be contiguous")
    return flat


def _device(pool: LayerPool) -> str:
    return "cpu" if isinstance(pool, np.ndarray) else str(pool.device)


def _is_contiguous(pool: LayerPool) -> bool:
    return pool.flags.c_contiguous if isinstance(pool, np.ndarray) else pool.is_contiguous()


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums of records: 64 bits over a record's bytes, its name and the model's fingerprint.

    Workers that exchange records, and files, need the same function (`engine/native/sums.py` has a fast
    one)."""

    kind: int
    """Number of the function in files and messages."""
    digest: Callable[[RecordRow], int]
    """Returns at most 64 bits for a record's bytes."""

    def of(self, row: RecordRow, name: BlockHash, fingerprint: bytes) -> int:
        """Return the checksum of a record that belongs to `name`."""
        return self.digest(row) ^ int.from_bytes(blake2b(name, key=fingerprint, digest_size=8).digest())


CRC = Checksums(0, lambda row: zlib.crc32(row.data))
