"""The assignment of device buffers to blocks that a step reads from host memory. Pure.

*Spare* device blocks serve as buffers. A block outside needs a pair of buffers for one layer: one is read
while the other is filled. With 8 layers, 3 spare blocks are 12 pairs. A block keeps its pair for the next
step, so that its first layers can be fetched ahead."""

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]
_NONE = -1


class FetchBuffers:
    """Pairs of buffers for `ids` blocks, in spare device blocks of `layers` parts each."""

    def __init__(self, ids: int, layers: int, device_blocks: int) -> None:
        self._layers, self._device_blocks = layers, device_blocks
        self.spare: list[int] = []
        """The device's blocks that buffers are made of."""
        self.pair: Blocks = np.full(ids, _NONE, dtype=np.int32)
        """Pair of each id."""
        self.is_warm = np.zeros(ids, dtype=bool)
        """Whether the last step fetched the id into the same buffers and it is still outside."""
        self._free: list[int] = []

    @property
    def pairs(self) -> int:
        """Number of blocks that can be fetched in one step."""
        return len(self.spare) * self._layers // 2

    def add(self, slot: int) -> None:
        """Use a device block for buffers; call `renumber` afterwards."""
        self.spare.append(slot)

    def remove(self) -> int:
        """Return a device block no longer used for buffers; call `renumber` afterwards."""
        return self.spare.pop()

    def renumber(self) -> None:
        """Adapt to a changed number of buffers; remaining pairs keep their blocks."""
        self.pair[self.pair >= self.pairs] = _NONE
        self.is_warm[:] = False
        taken = set(self.pair[self.pair >= 0].tolist())
        self._free = [pair for pair in range(self.pairs) if pair not in taken]

    def claim(self, blocks: Blocks) -> None:
        """Give each block a pair, taken from other blocks if necessary. Raises ValueError if too few."""
        missing = blocks[self.pair[blocks] < 0]
        if len(missing) > len(self._free):
            idle = self.pair >= 0
            idle[blocks] = False
            for block in np.flatnonzero(idle)[: len(missing) - len(self._free)].tolist():
                self.forget(block)
        if len(missing) > len(self._free):
            raise ValueError(f"{len(blocks)} blocks outside are read with only {self.pairs} pairs of buffers")
        for block in missing.tolist():
            self.pair[block] = self._free.pop()

    def forget(self, block: int) -> None:
        """Take the block's pair away."""
        pair = int(self.pair[block])
        self.is_warm[block] = False
        if pair >= 0:
            self.pair[block] = _NONE
            if pair < self.pairs:
                self._free.append(pair)

    def arena(self, pairs: Blocks, parity: int) -> Blocks:
        """Return the places of the pairs' buffers of one parity in memory ordered by layer."""
        at = 2 * pairs.astype(np.int64) + parity
        spare = np.array(self.spare or [0], dtype=np.int64)[at // self._layers]
        found: Blocks = (at % self._layers * self._device_blocks + spare).astype(np.int32)
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless each pair is free or one block's."""
        taken = self.pair[self.pair >= 0].tolist()
        assert sorted([*taken, *self._free]) == list(range(self.pairs))
