"""The device's buffers for blocks that a step reads from host memory: which block has which. Pure.

Some of the device's blocks are *spare*: one of them has the parts of all layers, and a block outside needs
two buffers of one layer's part, one of which is read while the other is filled. Of 8 layers, 3 spare blocks
are 12 pairs. A block that the next step reads as well keeps its pair, so that its first layers can be brought
in ahead.
"""

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]
_NONE = -1


class FetchBuffers:
    """Pairs of buffers for up to `ids` blocks, in the device's blocks of `layers` parts each."""

    def __init__(self, ids: int, layers: int, device_blocks: int) -> None:
        self._layers, self._device_blocks = layers, device_blocks
        self.spare: list[int] = []
        """The device's blocks that buffers are made of."""
        self._pair: Blocks = np.full(ids, _NONE, dtype=np.int32)
        """By id."""
        self.is_warm = np.zeros(ids, dtype=bool)
        """By id: the last step brought it in, and it is still outside, in the same buffers."""
        self._free: list[int] = []

    @property
    def pairs(self) -> int:
        """Number of blocks that can be fetched in one step."""
        return len(self.spare) * self._layers // 2

    def add(self, slot: int) -> None:
        """Buffers are made of that block of the device, too; to be ended by `renumber`."""
        self.spare.append(slot)

    def remove(self) -> int:
        """One of the device's blocks less; to be ended by `renumber`."""
        return self.spare.pop()

    def renumber(self) -> None:
        """Their count has changed: those there are keep their blocks."""
        self._pair[self._pair >= self.pairs] = _NONE
        self.is_warm[:] = False
        taken = set(self._pair[self._pair >= 0].tolist())
        self._free = [pair for pair in range(self.pairs) if pair not in taken]

    def claim(self, blocks: Blocks) -> None:
        """Each of these has a pair; others give theirs up as far as is needed. Raises ValueError when there
        are too few."""
        missing = blocks[self._pair[blocks] < 0]
        if len(missing) > len(self._free):
            idle = self._pair >= 0
            idle[blocks] = False
            for block in np.flatnonzero(idle)[: len(missing) - len(self._free)].tolist():
                self.forget(block)
        if len(missing) > len(self._free):
            raise ValueError(f"{len(blocks)} blocks outside are read, and there are {self.pairs} buffers")
        for block in missing.tolist():
            self._pair[block] = self._free.pop()

    def forget(self, block: int) -> None:
        """It has none any more."""
        pair = int(self._pair[block])
        self.is_warm[block] = False
        if pair >= 0:
            self._pair[block] = _NONE
            if pair < self.pairs:
                self._free.append(pair)

    def pairs_of(self, blocks: Blocks) -> Blocks:
        return self._pair[blocks]

    def arena(self, pairs: Blocks, parity: int) -> Blocks:
        """Where these are in memory that has the device's blocks layer by layer; two of each, by parity."""
        at = 2 * pairs.astype(np.int64) + parity
        spare = np.array(self.spare or [0], dtype=np.int64)[at // self._layers]
        found: Blocks = (at % self._layers * self._device_blocks + spare).astype(np.int32)
        return found

    def check_integrity(self) -> None:
        """AssertionError unless each pair is one block's or free."""
        taken = self._pair[self._pair >= 0].tolist()
        assert sorted([*taken, *self._free]) == list(range(self.pairs))
