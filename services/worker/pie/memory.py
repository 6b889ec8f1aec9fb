"""The bytes of Pie: slots of one layer's K and V on the device, copies of used blocks on the host.

Shapes are those of `services.worker.engine.paged`; all layers have the same. Device memory is allocated
once and cut into slots; a copy on the host holds the used blocks alone, one after the other, with their
ids. Decides nothing; safe to use from several threads as long as no slot is in two copies.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.worker.pie.partition import Partition, Shift

_CHUNK_BYTES = 256 << 10
"""Copied between two looks at the link."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One block of one layer."""

    kv_heads: int
    head_dim: int
    value_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def key(self) -> tuple[int, int, int]:
        return self.kv_heads, self.head_dim, self.block_tokens

    @property
    def value(self) -> tuple[int, int, int]:
        return self.kv_heads, self.block_tokens, self.value_dim

    @property
    def block_bytes(self) -> int:
        elements = self.kv_heads * self.block_tokens * (self.head_dim + self.value_dim)
        return elements * self.dtype.itemsize


@dataclass(slots=True)
class HostCopy:
    """One layer's used blocks: `keys` `[rows, …]`, `values` `[rows, …]`, of which the first `len(ids)`
    count.
    """

    keys: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    """Int64, ascending."""


class LayerMemory:
    """The device's arenas and the host's copies."""

    def __init__(
        self,
        shape: BlockShape,
        partition: Partition,
        device: torch.device,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """`keys` `[arena_blocks, …]` and `values` `[arena_blocks, …]`, zero, on `device`."""
        self.shape, self.partition, self.device = shape, partition, device
        self._arenas = (keys, values)
        self._host: dict[int, HostCopy] = {}
        self._chunk_blocks = max(1, _CHUNK_BYTES // shape.block_bytes)

    def views(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot, `[slot_blocks, …]`; valid until the next resize."""
        first, blocks = self.partition.first_block(slot), self.partition.slot_blocks
        keys, values = self._arenas
        return keys[first : first + blocks], values[first : first + blocks]

    def copy_out(self, slot: int, host_slot: int, ids: torch.Tensor, sent: Callable[[int], None]) -> int:
        """The blocks `ids` (int64, ascending) of a slot to the host; `sent` hears of every part's bytes.

        Returns the bytes.
        """
        copy = self._host_copy(host_slot, len(ids))
        copy.ids = ids
        keys, values = self.views(slot)
        for start in range(0, len(ids), self._chunk_blocks):
            part = ids[start : start + self._chunk_blocks]
            end = start + len(part)
            _gather(keys, part, copy.keys[start:end])
            _gather(values, part, copy.values[start:end])
            sent(len(part) * self.shape.block_bytes)
        return len(ids) * self.shape.block_bytes

    def copy_in(self, slot: int, host_slot: int, sent: Callable[[int], None]) -> int:
        """What was copied out last to this place of the host; blocks beyond the slot are gone by now."""
        copy, (keys, values) = self._host.get(host_slot), self.views(slot)
        if copy is None:  # A layer that began on the host: nothing was ever written.
            return 0
        rows = int(torch.searchsorted(copy.ids, self.partition.slot_blocks))
        for start in range(0, rows, self._chunk_blocks):
            part = copy.ids[start : min(rows, start + self._chunk_blocks)]
            end = start + len(part)
            _scatter(copy.keys[start:end], part, keys)
            _scatter(copy.values[start:end], part, values)
            sent(len(part) * self.shape.block_bytes)
        return rows * self.shape.block_bytes

    def _host_copy(self, host_slot: int, rows: int) -> HostCopy:
        copy = self._host.get(host_slot)
        if copy is None or copy.keys.shape[0] < rows:
            room = max(rows * 5 // 4, 1)
            is_pinned = self.device.type == "cuda"
            keys, values = (
                torch.empty((room, *size), dtype=self.shape.dtype, pin_memory=is_pinned)
                for size in (self.shape.key, self.shape.value)
            )
            copy = self._host[host_slot] = HostCopy(keys, values, torch.empty(0, dtype=torch.int64))
        return copy

    def move_blocks(self, slot: int, moves: Mapping[int, int]) -> None:
        """Within a slot, from blocks to others; no block is both."""
        source, target = (torch.tensor(list(ids), device=self.device) for ids in (moves, moves.values()))
        for pool in self.views(slot):
            pool.index_copy_(0, target, pool.index_select(0, source))

    def rename_blocks(self, host_slot: int, moves: Mapping[int, int]) -> None:
        """Blocks of a copy are called otherwise from now on; what had the new names is forgotten."""
        copy = self._host.get(host_slot)
        if copy is None:
            return
        gone, ids = set(moves.values()), copy.ids.tolist()
        kept = sorted((moves.get(block, block), row) for row, block in enumerate(ids) if block not in gone)
        copy.ids = torch.tensor([block for block, _ in kept], dtype=torch.int64)
        order = torch.tensor([row for _, row in kept], dtype=torch.int64)
        for rows in (copy.keys, copy.values):
            rows[: len(kept)] = rows[order]

    def relocate(self, from_slot: int, to_slot: int) -> None:
        """The contents of a slot to an empty one."""
        for source, target in zip(self.views(from_slot), self.views(to_slot), strict=True):
            target.copy_(source)

    def shift(self, shifts: Sequence[Shift], occupied: frozenset[int]) -> None:
        """After `Partition.resize`; only slots that hold something are moved."""
        for each in shifts:
            if each.slot in occupied:
                for arena in self._arenas:
                    _move(arena, each.from_block, each.to_block, each.blocks)


def _gather(slot: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Blocks `ids` of a slot to consecutive rows on the host; on CUDA in the order of the current stream."""
    if slot.device.type == "cpu":
        torch.index_select(slot, 0, ids, out=rows)
    else:
        rows.copy_(slot.index_select(0, ids.to(slot.device, non_blocking=True)), non_blocking=True)


def _scatter(rows: torch.Tensor, ids: torch.Tensor, slot: torch.Tensor) -> None:
    """Rows on the host to the blocks `ids` of a slot."""
    if slot.device.type == "cuda":
        ids, rows = ids.to(slot.device, non_blocking=True), rows.to(slot.device, non_blocking=True)
    slot.index_copy_(0, ids, rows)


def _move(arena: torch.Tensor, from_block: int, to_block: int, blocks: int) -> None:
    """`blocks` rows within a contiguous tensor; the two ranges may overlap."""
    if arena.device.type == "cpu":
        row_bytes = arena.stride(0) * arena.element_size()
        base = arena.data_ptr()
        ctypes.memmove(base + to_block * row_bytes, base + from_block * row_bytes, blocks * row_bytes)
        return
    step = abs(to_block - from_block)  # No more at once than lies between: such parts do not overlap.
    starts = range(0, blocks, step)
    for start in starts if to_block < from_block else reversed(starts):
        count = min(step, blocks - start)
        arena[to_block + start : to_block + start + count].copy_(
            arena[from_block + start : from_block + start + count]
        )
