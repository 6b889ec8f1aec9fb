"""The block table of a sequence: its block ids in order, as one growing array of int32.

A step copies tables as bytes. With lists of Python integers, each step would visit every block: 131,072 of
them for 256 sequences of 8,192 tokens.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BlockTable: TypeAlias = "array[int]"
"""An array of int32, which must not grow while a view of its memory exists."""


def block_table(blocks: Iterable[int] = ()) -> BlockTable:
    """Return a new table. Raises OverflowError for an id beyond int32."""
    return array("i", blocks)


def first_borrowed(table: BlockTable, own_blocks: int) -> int:
    """Return the index of the first borrowed block; the table's length when there is none."""
    borrowed = np.flatnonzero(np.frombuffer(bytes(table), dtype=np.int32) >= own_blocks)
    return int(borrowed[0]) if len(borrowed) else len(table)


def joined(tables: Iterable[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return a concatenated copy of tables; fast for a `BlockTable`."""
    flat = bytearray().join([each if isinstance(each, array) else block_table(each) for each in tables])
    return np.frombuffer(flat, dtype=np.int32)
