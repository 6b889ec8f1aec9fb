"""Random calls of the native operator, whole and over parts of the blocks, and what they should give."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from services.worker.engine.spans import PackedSpans
from tests.services.worker.engine.reference import Attended, expected, problem


@dataclass(frozen=True)
class Case:
    """One call of the operator."""

    block_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    rows: tuple[tuple[int, int], ...]
    """(first position, count) of each span."""
    dtype: torch.dtype = torch.float32
    window_tokens: int | None = None
    softcap: float | None = None
    sharpness: float = 1.0
    """Of the scores, in standard deviations. Rounding errors grow with it: 1 is what models have."""
    seed: int = 0
    parts: tuple[float, ...] = field(default=())
    """Where each sequence's table is cut, as shares of its blocks."""

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scaling(self) -> float:
        return self.sharpness * float(self.head_dim**-0.5)


class World:
    """Pools that hold a case's keys and values in shuffled blocks; every slot of no sequence is NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        made = problem(
            case.rows,
            heads=(case.q_heads, case.kv_heads),
            dims=(case.head_dim, case.value_dim),
            block_tokens=case.block_tokens,
            seed=case.seed,
        )
        self.k, self.v, self.query = made.k_pool.to(case.dtype), made.v_pool.to(case.dtype), made.query
        self.made = replace(made, k_pool=self.k, v_pool=self.v)
        self.tables = [list(span.blocks) for span in made.spans]

    def packed(self, part: int = 0) -> PackedSpans:
        """The step over the `part`-th piece of every table."""
        case = self.case
        shares = (0.0, *case.parts, 1.0)
        tables, starts, ends = [], [], []
        for table, (first, count) in zip(self.tables, case.rows, strict=True):
            low, high = (round(share * len(table)) for share in shares[part : part + 2])
            tables.append(table[low:high])
            starts.append(low * case.block_tokens)
            ends.append(min(high * case.block_tokens, first + count))
        return PackedSpans(
            first_row=_starts([count for _, count in case.rows]),
            first_position=np.array([first for first, _ in case.rows], dtype=np.int32),
            table_start=_starts([len(table) for table in tables]),
            table_position=np.array(starts, dtype=np.int32),
            key_end=np.array(ends, dtype=np.int32),
            blocks=np.array([block for table in tables for block in table], dtype=np.int32),
            slots=np.zeros(0, dtype=np.int64),
        )

    def bounds(self) -> tuple[float, float]:
        return self.made.bounds(self.case.scaling, self.case.softcap, len(self.case.parts) + 1)

    def expected(self) -> Attended:
        return expected(self.made, self.case.scaling, self.case.softcap, self.case.window_tokens)


def _starts(lengths: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
