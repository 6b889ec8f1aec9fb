"""Sets of blocks, and runs of consecutive ids that copies cover. Pure.

A set is an int with a bit for each block: thousands of blocks are joined and compared in a microsecond.
Pools give low ids out first, so that what is in use lies in few runs; holes that take longer to go round than
to copy are copied along.
"""

from collections.abc import Iterable, Sequence

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
