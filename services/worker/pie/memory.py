"""The bytes of Pie: slots of one layer's K and V on the device, copies of used blocks on the host.

Shapes are those of `services.worker.engine.paged`; all layers have the same. Device memory is allocated
once and cut into slots; a copy on the host has each block where the slot has it, so that a run of blocks is
one transfer, on a GPU by its copy engines alone. Decides nothing; safe to use from several threads as long
as no slot is in two copies.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.worker.pie import runs as blocks_in_runs
from services.worker.pie.partition import Partition, Shift
from services.worker.pie.runs import Runs

_CHUNK_BYTES = 256 << 10
"""Copied between two looks at a link of RAM."""
_HOLE_BYTES = 64 << 10
"""As soon copied as gone round."""


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
    """One layer's blocks, by id: `keys` `[rows, …]`, `values` `[rows, …]`; what is not in `runs` is void."""

    keys: torch.Tensor
    values: torch.Tensor
    runs: Runs = ()


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
        if device.type == "cuda":  # Its link is real: nothing to pace, and each part costs a launch.
            self._chunk_blocks = partition.arena_blocks

    def views(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot, `[slot_blocks, …]`; valid until the next resize."""
        first, blocks = self.partition.first_block(slot), self.partition.slot_blocks
        keys, values = self._arenas
        return keys[first : first + blocks], values[first : first + blocks]

    def runs_of(self, used: Sequence[int]) -> Runs:
        """What copies of these blocks (ascending) cover."""
        return blocks_in_runs.runs_of(used, _HOLE_BYTES // self.shape.block_bytes)

    def copy_out(self, slot: int, host_slot: int, runs: Runs, sent: Callable[[int], None]) -> int:
        """The blocks in `runs` of a slot to the host; `sent` hears of every part's bytes.

        Returns the bytes. On CUDA in the order of the current stream. Raises ValueError for blocks that the
        slot has not.
        """
        if runs and runs[-1][1] > self.partition.slot_blocks:
            raise ValueError(f"block {runs[-1][1] - 1} of a slot of {self.partition.slot_blocks}")
        views, copy = self.views(slot), self._host_copy(host_slot)
        copy.runs = runs
        return self._copy(views, (copy.keys, copy.values), runs, sent)

    def copy_in(self, slot: int, host_slot: int, sent: Callable[[int], None]) -> int:
        """What was copied out last to this place of the host; blocks beyond the slot are gone by now."""
        copy = self._host.get(host_slot)
        if copy is None:  # A layer that began on the host: nothing was ever written.
            return 0
        runs = blocks_in_runs.cut(copy.runs, self.partition.slot_blocks)
        return self._copy((copy.keys, copy.values), self.views(slot), runs, sent)

    def _copy(
        self,
        sources: tuple[torch.Tensor, torch.Tensor],
        targets: tuple[torch.Tensor, torch.Tensor],
        runs: Runs,
        sent: Callable[[int], None],
    ) -> int:
        for first, end in blocks_in_runs.pieces(runs, self._chunk_blocks):
            for source, target in zip(sources, targets, strict=True):
                target[first:end].copy_(source[first:end], non_blocking=True)
            sent((end - first) * self.shape.block_bytes)
        return blocks_in_runs.count(runs) * self.shape.block_bytes

    def _host_copy(self, host_slot: int) -> HostCopy:
        """With room for a slot: pinned memory is dear to allocate, and what is not touched costs nothing."""
        copy, rows = self._host.get(host_slot), self.partition.slot_blocks
        if copy is None or copy.keys.shape[0] < rows:
            is_pinned = self.device.type == "cuda"
            keys, values = (
                torch.empty((rows, *size), dtype=self.shape.dtype, pin_memory=is_pinned)
                for size in (self.shape.key, self.shape.value)
            )
            copy = self._host[host_slot] = HostCopy(keys, values)
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
        rows = copy.keys.shape[0]
        there = {block: to for block, to in moves.items() if block < rows}
        source, target = (torch.tensor(list(ids), dtype=torch.int64) for ids in (there, there.values()))
        for each in (copy.keys, copy.values):
            each[target] = each[source]
        copy.runs = blocks_in_runs.renamed(copy.runs, there)

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
