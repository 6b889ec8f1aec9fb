"""Whole blocks out of the per-layer pools into contiguous records, and back.

A record holds one block over all layers: for each layer the bytes of K, then those of V, as they lie in the
pools. Calls return when the bytes are there; each object is for one thread at a time. Knows no name, no slot
and no file.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shared.blocks import BlockHash

RecordRow = npt.NDArray[np.uint8]
"""One record, `[record_bytes]`."""
LayerPools = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""By layer: K `[num_blocks, kv_heads, head_dim, block_tokens]`, V `[num_blocks, kv_heads, block_tokens,
value_dim]`, each contiguous."""


class Records:
    """The pools of one engine as rows of bytes. For one thread at a time: what goes to or from a GPU passes
    through one piece of page-locked memory."""

    def __init__(self, pools: LayerPools) -> None:
        """Raises ValueError when a pool is not contiguous or the pools differ in blocks or device."""
        flat = [pool for layer in pools for pool in layer]
        if not flat or len({(pool.shape[0], pool.device) for pool in flat}) != 1:
            raise ValueError("pools need the same number of blocks on one device")
        if not all(pool.is_contiguous() for pool in flat):
            raise ValueError("pools have to be contiguous")
        self._pools = pools
        self._stream: torch.cuda.Stream | None = None
        self._parts = [pool.view(pool.shape[0], -1).view(torch.uint8) for pool in flat]
        self._ends = np.cumsum([part.shape[1] for part in self._parts]).tolist()
        self._starts = [0, *self._ends[:-1]]
        self.record_bytes: int = self._ends[-1]
        self.device = flat[0].device
        self._arrays = [part.numpy() for part in self._parts] if self.device.type == "cpu" else []
        self._pinned = torch.empty(0, self.record_bytes, dtype=torch.uint8)

    def twin(self) -> "Records":
        """The same pools for another thread: with a staging and, on a GPU, a stream of its own, so that its
        copies do not wait for the engine's kernels."""
        twin = Records(self._pools)
        if self.device.type == "cuda":
            twin._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return twin

    def read(self, blocks: Sequence[int], rows: Sequence[RecordRow]) -> None:
        """Blocks → rows, both of one length."""
        if self.device.type == "cpu":
            for array, start, end in zip(self._arrays, self._starts, self._ends, strict=True):
                for block, row in zip(blocks, rows, strict=True):
                    row[start:end] = array[block]
            return
        staged = self._staging(len(blocks))
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self.device)
            gathered = torch.cat([part.index_select(0, index) for part in self._parts], dim=1)
            staged.copy_(gathered, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
        for record, row in zip(staged.numpy(), rows, strict=True):
            row[:] = record

    def write(self, rows: Sequence[RecordRow], blocks: Sequence[int]) -> None:
        """Rows → blocks, both of one length."""
        if self.device.type == "cpu":
            for array, start, end in zip(self._arrays, self._starts, self._ends, strict=True):
                for block, row in zip(blocks, rows, strict=True):
                    array[block] = row[start:end]
            return
        staged = self._staging(len(blocks))
        for record, row in zip(staged.numpy(), rows, strict=True):
            record[:] = row
        with torch.cuda.stream(self._stream):
            index = torch.tensor(blocks, device=self.device)
            arrived = staged.to(self.device, non_blocking=True)
            for part, start, end in zip(self._parts, self._starts, self._ends, strict=True):
                part.index_copy_(0, index, arrived[:, start:end])
            torch.cuda.current_stream(self.device).synchronize()

    def _staging(self, rows: int) -> torch.Tensor:
        """Page-locked memory, so that one copy crosses the bus at its full speed."""
        if self._pinned.shape[0] < rows:
            self._pinned = torch.empty(rows, self.record_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:rows]


def checksum(row: RecordRow, name: BlockHash, fingerprint: bytes) -> int:
    """Of a record that belongs to `name`."""
    return zlib.crc32(row.data, zlib.crc32(name + fingerprint))
