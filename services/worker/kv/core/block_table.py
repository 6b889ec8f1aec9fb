"""Which blocks a sequence has, from its beginning: int32 in one piece of memory that grows at its end.

A step copies tables as bytes. In a list of Python's numbers every block would be looked at in every step:
131,072 of them at 256 sequences of 8,192 tokens.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BlockTable: TypeAlias = "array[int]"
"""Of `int32`. It must not grow while a view of its memory is kept."""


def block_table(blocks: Iterable[int] = ()) -> BlockTable:
    """A table of its own. Raises OverflowError for an id that int32 cannot hold."""
    return array("i", blocks)


def first_borrowed(table: BlockTable, own_blocks: int) -> int:
    """Index of the first block that is not the worker's own; their count when all are."""
    borrowed = np.flatnonzero(np.frombuffer(bytes(table), dtype=np.int32) >= own_blocks)
    return int(borrowed[0]) if len(borrowed) else len(table)


def joined(tables: Iterable[Sequence[int]]) -> npt.NDArray[np.int32]:
    """One after the other, as a copy; quick for those that are a `BlockTable`."""
    flat = bytearray().join([each if isinstance(each, array) else block_table(each) for each in tables])
    return np.frombuffer(flat, dtype=np.int32)
