"""Blocks in use as runs of consecutive ids: what a copy covers. Pure.

Pools give low ids out first, so that what is in use lies in few runs; holes that take longer to go round than
to copy are copied along.
"""

from collections.abc import Iterable, Mapping, Sequence

Run = tuple[int, int]
"""From a block to the one after the last."""
Runs = tuple[Run, ...]
"""Ascending, apart from each other."""


def runs_of(blocks: Sequence[int], hole_blocks: int = 0) -> Runs:
    """`blocks` ascending; holes of at most `hole_blocks` are taken along."""
    if not blocks:
        return ()
    breaks = [at for at in range(1, len(blocks)) if blocks[at] - blocks[at - 1] - 1 > hole_blocks]
    firsts, lasts = [0, *breaks], [*(at - 1 for at in breaks), len(blocks) - 1]
    return tuple((blocks[first], blocks[last] + 1) for first, last in zip(firsts, lasts, strict=True))


def cut(runs: Runs, blocks: int) -> Runs:
    """Without what lies beyond the first `blocks` blocks."""
    return tuple((first, min(end, blocks)) for first, end in runs if first < blocks)


def pieces(runs: Runs, most_blocks: int) -> Iterable[Run]:
    """In parts of no more than `most_blocks`."""
    for first, end in runs:
        for start in range(first, end, most_blocks):
            yield start, min(end, start + most_blocks)


def count(runs: Runs) -> int:
    return sum(end - first for first, end in runs)


def renamed(runs: Runs, moves: Mapping[int, int]) -> Runs:
    """With the blocks that `moves` moved into; where they came from stays, as a hole."""
    blocks = {block for first, end in runs for block in range(first, end)}
    return runs_of(sorted(blocks | {to for block, to in moves.items() if block in blocks}))
