"""The bytes of Pie: slots of one layer's K and V on the device, copies of blocks on the host.

Shapes are those of `services.worker.engine.paged`; all layers have the same. Device memory is allocated
once and cut into slots; a copy on the host has each block where the slot has it, so that a run of blocks is
one transfer, on a GPU by its copy engines alone. In RAM blocks that lie alone go in one gather. Decides
nothing; safe to use from several threads as long as no slot is in two copies.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from services.worker.pie.core import copies as blocks_in_runs
from services.worker.pie.core.copies import Run, Runs
from services.worker.pie.core.sizes import Partition, Shift

_CHUNK_BYTES = 4 << 20
"""Copied between two looks at a link of RAM."""
_HOLE_BYTES = 64 << 10
"""As soon copied as gone round; shorter runs in RAM are gathered."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block of one layer holds."""

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
    """One layer's blocks, by id: `keys` `[rows, …]`, `values` `[rows, …]`."""

    keys: torch.Tensor
    values: torch.Tensor


class LayerMemory:
    """The device's arena, cut into slots, and the layers' copies on the host."""

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
        self._hole_blocks = _HOLE_BYTES // shape.block_bytes
        self._short_blocks = self._hole_blocks
        if device.type == "cuda":  # Its link is real: nothing to pace, and each part costs a launch.
            self._chunk_blocks = partition.arena_blocks
            self._short_blocks = 0

    def views(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot, `[slot_blocks, …]`; valid until the next resize."""
        first, blocks = self.partition.first_block(slot), self.partition.slot_blocks
        keys, values = self._arenas
        return keys[first : first + blocks], values[first : first + blocks]

    def runs_out(self, blocks: int) -> Runs:
        """What a copy out of this set covers. In RAM no holes: what a step wrote lies scattered."""
        return blocks_in_runs.runs_of(blocks, 0 if self._short_blocks else self._hole_blocks)

    def runs_in(self, blocks: int, fresh: int) -> Runs:
        """What a copy in of this set covers: what the slot has, and holes that are `fresh` on the host."""
        there = blocks & blocks_in_runs.first_blocks(self.partition.slot_blocks)
        return blocks_in_runs.runs_of(there, self._hole_blocks, fresh)

    def copy_out(self, slot: int, host_slot: int, runs: Runs, sent: Callable[[int], None]) -> int:
        """The blocks in `runs` of a slot to a place that was reserved; `sent` hears of every part's bytes.

        Returns the bytes. On CUDA in the order of the current stream. Raises ValueError for blocks that the
        slot has not.
        """
        if runs and runs[-1][1] > self.partition.slot_blocks:
            raise ValueError(f"block {runs[-1][1] - 1} of a slot of {self.partition.slot_blocks}")
        copy = self._host[host_slot]
        return self._copy(self.views(slot), (copy.keys, copy.values), runs, sent)

    def copy_in(self, slot: int, host_slot: int, runs: Runs, sent: Callable[[int], None]) -> int:
        """The blocks in `runs` of a copy to a slot that has them all."""
        copy = self._host.get(host_slot)
        if copy is None:  # A layer that began on the host: nothing was ever written.
            return 0
        return self._copy((copy.keys, copy.values), self.views(slot), runs, sent)

    def _copy(
        self,
        sources: tuple[torch.Tensor, torch.Tensor],
        targets: tuple[torch.Tensor, torch.Tensor],
        runs: Runs,
        sent: Callable[[int], None],
    ) -> int:
        long = tuple(run for run in runs if run[1] - run[0] >= self._short_blocks)
        for first, end in blocks_in_runs.pieces(long, self._chunk_blocks):
            for source, target in zip(sources, targets, strict=True):
                target[first:end].copy_(source[first:end], non_blocking=True)
            sent((end - first) * self.shape.block_bytes)
        if len(long) < len(runs):
            short = (run for run in runs if run[1] - run[0] < self._short_blocks)
            self._gather(sources, targets, short, sent)
        return blocks_in_runs.count(runs) * self.shape.block_bytes

    def _gather(
        self,
        sources: tuple[torch.Tensor, torch.Tensor],
        targets: tuple[torch.Tensor, torch.Tensor],
        runs: Iterable[Run],
        sent: Callable[[int], None],
    ) -> None:
        """Many short runs in RAM, by few calls: the engine's thread wants the interpreter, too."""
        blocks = (block for first, end in runs for block in range(first, end))
        while chosen := list(islice(blocks, self._chunk_blocks)):
            ids = torch.tensor(chosen)
            for source, target in zip(sources, targets, strict=True):
                target.index_copy_(0, ids, source.index_select(0, ids))
            sent(len(chosen) * self.shape.block_bytes)

    def reserve(self, host_slot: int) -> bool:
        """Room for a whole slot: pinned memory is dear to allocate, and what is not touched costs nothing.

        True where the place has nothing in it, or has no longer.
        """
        copy, rows = self._host.get(host_slot), self.partition.slot_blocks
        if copy is not None and copy.keys.shape[0] >= rows:
            return False
        is_pinned = self.device.type == "cuda"
        with torch.inference_mode(False):  # Other threads write to them, outside of any such mode.
            keys, values = (
                torch.empty((rows, *size), dtype=self.shape.dtype, pin_memory=is_pinned)
                for size in (self.shape.key, self.shape.value)
            )
        self._host[host_slot] = HostCopy(keys, values)
        return True

    def move_blocks(self, slot: int, moves: Mapping[int, int]) -> None:
        """Within a slot, from blocks to others; no block is both."""
        source, target = (torch.tensor(list(ids), device=self.device) for ids in (moves, moves.values()))
        for pool in self.views(slot):
            pool.index_copy_(0, target, pool.index_select(0, source))

    def rename_blocks(self, host_slot: int, moves: Mapping[int, int]) -> None:
        """Blocks of a copy are called otherwise from now on; what had the new names is forgotten."""
        if not moves:
            return
        copy = self._host[host_slot]
        source, target = (torch.tensor(list(ids), dtype=torch.int64) for ids in (moves, moves.values()))
        for each in (copy.keys, copy.values):
            each[target] = each[source]

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
