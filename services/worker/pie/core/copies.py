"""What the host has of each layer: which blocks need not be sent again. Pure.

A block of a layer is *fresh* while its row in the layer's copy on the host has what the layer has in it.
A copy out sends the blocks in use that are not fresh, a copy in fetches those in use that are. Whoever writes
to a block says so; blocks that nobody uses are void, fresh or not, as whoever takes one writes it before it
is read. Knows no place and no bytes.
"""

from collections.abc import Iterable, Mapping, Sequence

Run = tuple[int, int]
"""From a block to the one after the last."""
Runs = tuple[Run, ...]
"""Ascending, apart from each other."""


def set_of(blocks: Sequence[int]) -> int:
    """Of ascending ids."""
    if not blocks:
        return 0
    breaks = [at for at in range(1, len(blocks)) if blocks[at] - blocks[at - 1] > 1]
    found = 0
    for first, last in zip([0, *breaks], [*(at - 1 for at in breaks), len(blocks) - 1], strict=True):
        found |= first_blocks(blocks[last] + 1 - blocks[first]) << blocks[first]
    return found


def first_blocks(count: int) -> int:
    """The set of blocks 0 … count-1."""
    return (1 << count) - 1


def runs_of(blocks: int, hole_blocks: int = 0, fillable: int = -1) -> Runs:
    """Of a set; holes of at most `hole_blocks`, all of them `fillable`, are taken along."""
    runs: list[Run] = []
    at = 0
    while blocks:
        gap = (blocks & -blocks).bit_length() - 1
        blocks >>= gap
        length = (~blocks & (blocks + 1)).bit_length() - 1
        is_joined = runs and gap <= hole_blocks and not (~fillable >> at) & first_blocks(gap)
        first = runs.pop()[0] if is_joined else at + gap
        at += gap + length
        blocks >>= length
        runs.append((first, at))
    return tuple(runs)


def pieces(runs: Runs, most_blocks: int) -> Iterable[Run]:
    """In parts of no more than `most_blocks`."""
    for first, end in runs:
        for start in range(first, end, most_blocks):
            yield start, min(end, start + most_blocks)


def count(runs: Runs) -> int:
    return sum(end - first for first, end in runs)


class HostCopies:
    """Sets of blocks by layer, as `services.worker.pie.core.copies` has them."""

    def __init__(self, layers: int) -> None:
        self._fresh = [0] * layers

    def fresh(self, layer: int) -> int:
        return self._fresh[layer]

    def on_written(self, layer: int, blocks: int) -> None:
        """Blocks of a layer on the device are written, or may be, from now on."""
        self._fresh[layer] &= ~blocks

    def on_moved(self, layer: int, moves: Mapping[int, int]) -> None:
        """Contents of blocks of a layer on the device went to others."""
        for to in moves.values():
            self._fresh[layer] &= ~(1 << to)

    def on_renamed(self, layer: int, moves: Mapping[int, int]) -> dict[int, int]:
        """Blocks of a layer on the host are called otherwise; the moves to be made in its copy."""
        fresh = self._fresh[layer]
        made = {block: to for block, to in moves.items() if fresh >> block & 1}
        for to in moves.values():
            fresh &= ~(1 << to)
        for to in made.values():
            fresh |= 1 << to
        self._fresh[layer] = fresh
        return made

    def leave(self, layer: int, used: int) -> int:
        """What a copy out has to send; fresh from now on."""
        sent = used & ~self._fresh[layer]
        self._fresh[layer] |= sent
        return sent

    def arrive(self, layer: int, used: int) -> int:
        """What a copy in has to fetch."""
        return used & self._fresh[layer]

    def forget(self, layer: int) -> None:
        """The layer's copy is gone, or nobody knows what was written since."""
        self._fresh[layer] = 0

    def forget_all(self) -> None:
        self._fresh = [0] * len(self._fresh)

    def cut(self, blocks: int) -> None:
        """There are only so many blocks left."""
        self._fresh = [fresh & ((1 << blocks) - 1) for fresh in self._fresh]
