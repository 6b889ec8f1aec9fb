"""Random steps over paged KV, and attention by its definition for them: in double, key by key."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from services.worker.engine.layout import PackedSpans
from tests.rounding import attention_bounds


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
        generator = torch.Generator().manual_seed(case.seed)
        lengths = [first + count for first, count in case.rows]
        needed = [-(-length // case.block_tokens) for length in lengths]
        blocks = sum(needed) + 2
        self.k = torch.full((blocks, case.kv_heads, case.head_dim, case.block_tokens), math.nan)
        self.v = torch.full((blocks, case.kv_heads, case.block_tokens, case.value_dim), math.nan)
        order = torch.randperm(blocks, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for table, length in zip(self.tables, lengths, strict=True):
            key = (
                torch.randn(length, case.kv_heads, case.head_dim, generator=generator).to(case.dtype).float()
            )
            value = torch.randn(length, case.kv_heads, case.value_dim, generator=generator)
            value = value.to(case.dtype).float()
            for position in range(length):
                block, slot = table[position // case.block_tokens], position % case.block_tokens
                self.k[block, :, :, slot], self.v[block, :, slot] = key[position], value[position]
            self.keys.append(key)
            self.values.append(value)
        self.k, self.v = self.k.to(case.dtype), self.v.to(case.dtype)
        rows = sum(count for _, count in case.rows)
        self.query = torch.randn(rows, case.q_heads, case.head_dim, generator=generator)

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
        """What rounding allows an output and a log-sum-exp to be off, whatever the order of the sums."""
        case = self.case
        return attention_bounds(
            self.query,
            torch.cat(self.keys),
            torch.cat(self.values),
            case.scaling,
            most_keys=max(first + count for first, count in case.rows),
            softcap=case.softcap,
            parts=len(case.parts) + 1,
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[rows, q_heads, value_dim]` and log-sum-exp `[rows, q_heads]`."""
        case = self.case
        outputs, lses, row = [], [], 0
        for key, value, (first, count) in zip(self.keys, self.values, case.rows, strict=True):
            query = self.query[row : row + count].double()
            row += count
            scores = torch.einsum("nhd,mhd->nhm", query, key.double().repeat_interleave(case.group, 1))
            scores *= case.scaling
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            position = torch.arange(first, first + count)[:, None]
            column = torch.arange(first + count)
            hidden = (column > position) | (column <= position - (case.window_tokens or first + count))
            scores = scores.masked_fill(hidden[:, None], -math.inf)
            values = value.double().repeat_interleave(case.group, 1)
            outputs.append(torch.einsum("nhm,mhd->nhd", scores.softmax(-1), values))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outputs).float(), torch.cat(lses).float()


def _starts(lengths: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
