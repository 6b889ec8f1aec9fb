"""Predicted block usage over time of the running sequences, in buckets of decode steps.

A sequence may start if the blocks suffice at every predicted completion. Source: algorithms.md §1 (Beyond the
paper: `ecoserve_profile`, `kvasir`).

    8 blocks of 4 tokens: a grows from 4 to 16 tokens, b from 4 to 8 → 4 and 2 blocks at their ends. c, which
    grows to 16 too, fits: when a and c hold 4 each, b is gone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BUCKET_TOKENS = 32
MAX_BUCKETS = 256
_Blocks = npt.NDArray[np.int64]
_LEAST_BUCKET_TOKENS = 4
_OVERCOUNT = 1 / 16
_NOTHING: _Blocks = np.zeros(0, dtype=np.int64)
_INDICES = np.arange(MAX_BUCKETS, dtype=np.int64)


def bucket_tokens(rests: Sequence[int], kv_tokens: int) -> int:
    """Return the best bucket width, a power of two, for the remaining tokens of the running sequences. A
    bucket overcounts each by up to its width; together at most a sixteenth of the KV, if the bucket count
    allows."""
    longest = max(rests, default=0)
    width = BUCKET_TOKENS
    while (
        width > _LEAST_BUCKET_TOKENS
        and len(rests) * width > kv_tokens * _OVERCOUNT
        and longest <= width // 2 * MAX_BUCKETS
    ):
        width //= 2
    return width


class UsageProfile:
    """Block usage of one worker from now on; started sequences are added.

    If all fit together at their ends, no time is needed; arrays are built only otherwise.
    """

    def __init__(
        self,
        growing: Sequence[tuple[int, int, int]],
        constant_blocks: int,
        limit_blocks: int,
        block_tokens: int,
        kv_tokens: int | None = None,
    ) -> None:
        """`growing`: (tokens now, tokens at the end, blocks held) of each running sequence. `kv_tokens`:
        capacity for `bucket_tokens`, None for the default width."""
        self._kv_tokens = kv_tokens
        self._bucket_tokens = BUCKET_TOKENS
        self._block_tokens = block_tokens
        self._limit_blocks = limit_blocks
        self._growing = growing
        self._constant_blocks = constant_blocks
        self._ceiling_blocks = constant_blocks
        """Blocks if all sequences were at their ends together."""
        for _, end, held in growing:
            blocks = -(-end // block_tokens)
            self._ceiling_blocks += blocks if blocks > held else held
        self._started: list[tuple[int, int, int]] | None = []
        """Sequences not yet in the arrays; None once arrays exist."""
        self._peak_blocks = constant_blocks
        self._usage: _Blocks = _NOTHING

    def _most(self, end_tokens: int, held_blocks: int) -> int:
        blocks = -(-end_tokens // self._block_tokens)
        return blocks if blocks > held_blocks else held_blocks

    def _make(self) -> None:
        """Build the arrays."""
        if self._started is None:
            return
        started, self._started = self._started, None
        if self._kv_tokens is not None:
            self._bucket_tokens = bucket_tokens([end - now for now, end, _ in self._growing], self._kv_tokens)
        self._usage = np.full(1, self._constant_blocks, dtype=np.int64)
        if self._growing:
            table: Any = np.array(self._growing, dtype=np.int64)
            now, end = table[:, 0:1], table[:, 1:2]
            self._reach(int((end - now).max()))
            self._usage += self._demand(now, end, table[:, 2:3]).sum(axis=0)
            self._peak_blocks = int(self._usage.max())
        for one in started:
            self._add(*one)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that may be taken for good; negative if there are too few."""
        self._make()
        return self._limit_blocks - self._peak_blocks

    def _reach(self, steps: int) -> None:
        """Extend the arrays to cover `steps`."""
        buckets = min(MAX_BUCKETS, max(1, -(-steps // self._bucket_tokens)))
        missing = buckets - len(self._usage)
        if missing > 0:
            self._usage = np.append(self._usage, np.full(missing, self._constant_blocks, dtype=np.int64))

    def _demand(self, now: Any, end: Any, held: Any) -> Any:
        starts = _INDICES[: len(self._usage)] * self._bucket_tokens
        blocks = -(-np.minimum(end, now + starts + self._bucket_tokens) // self._block_tokens)
        return np.where(starts < np.maximum(end - now, 1), np.maximum(blocks, held), 0)

    def which_fit(self, candidates: Sequence[tuple[int, int, int]]) -> list[bool]:
        """Return for each (tokens now, at the end, blocks held) whether it alone may run to its end."""
        most_blocks = max(self._most(end, held) for _, end, held in candidates)
        if self._ceiling_blocks + most_blocks <= self._limit_blocks:
            return [True] * len(candidates)
        self._make()
        table: Any = np.array(candidates, dtype=np.int64)
        now, end, held = table[:, 0:1], table[:, 1:2], table[:, 2:3]
        peaks: Any = (self._usage + self._demand(now, end, held)).max(axis=1)
        last = self._constant_blocks + -(-table[:, 1] // self._block_tokens)
        steps = table[:, 1] - table[:, 0]
        peaks = np.where(steps > len(self._usage) * self._bucket_tokens, np.maximum(peaks, last), peaks)
        fits: list[bool] = (peaks - table[:, 2] <= self._limit_blocks).tolist()
        return fits

    def fits(self, now_tokens: int, end_tokens: int, held_blocks: int) -> bool:
        """Return `which_fit` for one candidate."""
        if self._ceiling_blocks + self._most(end_tokens, held_blocks) - held_blocks <= self._limit_blocks:
            return True
        return self.room_beside(now_tokens, end_tokens, held_blocks) >= 0

    def room_beside(self, now_tokens: int, end_tokens: int, held_blocks: int) -> int:
        """Return the blocks that may be taken for good beside this candidate; negative if it does not fit."""
        self._make()
        demand: _Blocks = self._demand(now_tokens, end_tokens, held_blocks)
        peak = int((self._usage + demand).max())
        if end_tokens - now_tokens > len(self._usage) * self._bucket_tokens:
            peak = max(peak, self._constant_blocks + -(-end_tokens // self._block_tokens))
        return self._limit_blocks - peak + held_blocks

    def start(self, now_tokens: int, end_tokens: int, held_blocks: int) -> None:
        """Add a sequence that starts; its held blocks were counted as constant until now."""
        self._ceiling_blocks += self._most(end_tokens, held_blocks) - held_blocks
        if self._started is None:
            self._add(now_tokens, end_tokens, held_blocks)
        else:
            self._started.append((now_tokens, end_tokens, held_blocks))

    def _add(self, now_tokens: int, end_tokens: int, held_blocks: int) -> None:
        self._reach(end_tokens - now_tokens)
        self._usage = self._usage + self._demand(now_tokens, end_tokens, held_blocks) - held_blocks
        self._constant_blocks -= held_blocks
        self._peak_blocks = int(self._usage.max())
