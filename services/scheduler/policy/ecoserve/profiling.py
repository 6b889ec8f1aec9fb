"""Profile admission instead of exact allocations: a generation starts iff, as predicted, there will be enough
at every completion (`profile.py`). Blocks are taken as they are needed, out of one pool.

An answer that outlives its prediction is predicted anew and goes on where the profile allows it; else it
takes a block's worth of the reserve; else it pauses and keeps its KV. Everything else is `planner.py`.

Source: algorithms.md §1 (Beyond the paper: `ecoserve_profile`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.scheduler.policy.contract import PlannedBatch
from services.scheduler.policy.ecoserve.drafts import Draft
from services.scheduler.policy.ecoserve.jobs import Job
from services.scheduler.policy.ecoserve.planner import DecoupledPolicy

BUCKET_TOKENS = 32
MAX_BUCKETS = 256
Blocks = npt.NDArray[np.int64]
_LEAST_BUCKET_TOKENS = 4
_OVERCOUNT = 1 / 16
_INDICES = np.arange(MAX_BUCKETS, dtype=np.int64)


def bucket_tokens(rests: Sequence[int], kv_tokens: int) -> int:
    """How long buckets are best, when those that run have so many tokens to go in a KV of that size: a power
    of two. In a bucket each counts with up to that many tokens more than it has now; all of that is no more
    than a sixteenth of the KV, where buckets of 4 tokens allow it and the longest needs no more than there
    are."""
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
    """One worker's, at one moment."""

    def __init__(
        self,
        growing: Sequence[tuple[int, int, int]],
        constant_blocks: int,
        limit_blocks: int,
        block_tokens: int,
        bucket: int = BUCKET_TOKENS,
    ) -> None:
        """`growing`: (tokens now, tokens at the end, blocks held) of each that runs. `bucket`: tokens."""
        self._bucket_tokens = bucket
        self._block_tokens = block_tokens
        self._limit_blocks = limit_blocks
        self._constant_blocks = constant_blocks
        self._peak_blocks = constant_blocks
        self._usage: Blocks = np.full(1, constant_blocks, dtype=np.int64)
        if growing:
            table: Any = np.array(growing, dtype=np.int64)
            now, end = table[:, 0:1], table[:, 1:2]
            self._reach(int((end - now).max()))
            self._usage += self._demand(now, end, table[:, 2:3]).sum(axis=0)
            self._peak_blocks = int(self._usage.max())

    @property
    def free_blocks(self) -> int:
        """What may be taken for good without anybody ever missing it; negative when there is too little."""
        return self._limit_blocks - self._peak_blocks

    def _reach(self, steps: int) -> None:
        """As many buckets as that takes."""
        buckets = min(MAX_BUCKETS, max(1, -(-steps // self._bucket_tokens)))
        missing = buckets - len(self._usage)
        if missing > 0:
            self._usage = np.append(self._usage, np.full(missing, self._constant_blocks, dtype=np.int64))

    def _demand(self, now: Any, end: Any, held: Any) -> Any:
        starts = _INDICES[: len(self._usage)] * self._bucket_tokens
        blocks = -(-np.minimum(end, now + starts + self._bucket_tokens) // self._block_tokens)
        return np.where(starts < np.maximum(end - now, 1), np.maximum(blocks, held), 0)

    def which_fit(self, candidates: Sequence[tuple[int, int, int]]) -> list[bool]:
        """For each of (tokens now, tokens at the end, blocks held, which so far count for good): whether it
        alone may run to its end."""
        table: Any = np.array(candidates, dtype=np.int64)
        now, end, held = table[:, 0:1], table[:, 1:2], table[:, 2:3]
        peaks: Any = (self._usage + self._demand(now, end, held)).max(axis=1)
        last = self._constant_blocks + -(-table[:, 1] // self._block_tokens)
        steps = table[:, 1] - table[:, 0]
        peaks = np.where(steps > len(self._usage) * self._bucket_tokens, np.maximum(peaks, last), peaks)
        fits: list[bool] = (peaks - table[:, 2] <= self._limit_blocks).tolist()
        return fits

    def fits(self, now_tokens: int, end_tokens: int, held_blocks: int) -> bool:
        """`which_fit` for one."""
        return self.room_beside(now_tokens, end_tokens, held_blocks) >= 0

    def room_beside(self, now_tokens: int, end_tokens: int, held_blocks: int) -> int:
        """Blocks that may be taken for good, and this one still fits; negative when it does not."""
        demand: Blocks = self._demand(now_tokens, end_tokens, held_blocks)
        peak = int((self._usage + demand).max())
        if end_tokens - now_tokens > len(self._usage) * self._bucket_tokens:
            peak = max(peak, self._constant_blocks + -(-end_tokens // self._block_tokens))
        return self._limit_blocks - peak + held_blocks

    def start(self, now_tokens: int, end_tokens: int, held_blocks: int) -> None:
        """It runs from now; what it held was taken for good so far."""
        self._reach(end_tokens - now_tokens)
        self._usage = self._usage + self._demand(now_tokens, end_tokens, held_blocks) - held_blocks
        self._constant_blocks -= held_blocks
        self._peak_blocks = int(self._usage.max())


class ProfilingPolicy(DecoupledPolicy):
    """`ecoserve_profile`. Implements `contract.BatchPolicy`. Own blocks are those held, always."""

    _profile: UsageProfile | None = None
    _prompt_room_blocks: int | None = None
    """What prompts may take, once generations have been admitted."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._profile = self._prompt_room_blocks = None
        return super().plan(now_s)

    def _usage(self) -> UsageProfile:
        """As of this plan, up to date with whatever it has started."""
        if self._profile is None:
            self._profile = self._make_profile(self._capacity_blocks - self._reserve_blocks)
        return self._profile

    def _make_profile(self, limit_blocks: int) -> UsageProfile:
        growing = [
            (job.computed_tokens, max(job.end_tokens, job.computed_tokens), job.held_blocks)
            for job in self._running.values()
        ]
        ending = [
            (job.computed_tokens, job.computed_tokens, job.held_blocks) for job in self._complete.values()
        ]
        constant = self._held_blocks - sum(item[2] for item in growing) - sum(item[2] for item in ending)
        return UsageProfile(growing + ending, constant, limit_blocks, self._block_tokens)

    def _secure(self, draft: Draft, job: Job, now_s: float) -> bool:
        needed = self._blocks(job.computed_tokens + 1)
        if job.computed_tokens >= job.end_tokens and not self._prolong(job):
            self._pause(job, now_s)
            return False
        if needed > job.held_blocks:
            if needed - job.held_blocks > self._free_blocks:
                self._pause(job, now_s)
                return False
            self._set_own(job, needed)
        return True

    def _prolong(self, job: Job) -> bool:
        """A longer end for one that has reached its own."""
        rest = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)
        self._questions[job.task.key] = job.generated_tokens
        self._profile = None
        job.end_tokens = job.computed_tokens + rest
        if self._usage().free_blocks >= 0:
            return True
        job.end_tokens = job.computed_tokens + min(rest, self._block_tokens)
        self._profile = None
        return self._make_profile(self._capacity_blocks).free_blocks >= 0

    def _fits(self, job: Job) -> bool:
        return self._usage().fits(job.computed_tokens, job.computed_tokens + job.rest_tokens, job.held_blocks)

    def _leaves_room(self, blocks: int) -> bool:
        """A prompt may use the reserve; those that run must never miss what it takes."""
        if self._prompt_room_blocks is None:
            usage, head = self._usage(), self._generations.first()
            room = usage.free_blocks
            if head is not None:
                ends = head.computed_tokens + head.rest_tokens
                room = min(room, usage.room_beside(head.computed_tokens, ends, head.held_blocks))
            self._prompt_room_blocks = room + self._reserve_blocks
        return blocks <= min(self._prompt_room_blocks, self._free_blocks)

    def _start(self, draft: Draft, job: Job, blocks: int) -> None:
        """Nothing is set aside beyond the next token."""
        super()._start(draft, job, self._blocks(job.computed_tokens + 1))
        if self._profile is not None:
            self._profile.start(job.computed_tokens, job.end_tokens, job.held_blocks)

    def _draft_prompt(self, draft: Draft, job: Job, chunk_tokens: int) -> None:
        held = job.held_blocks
        super()._draft_prompt(draft, job, chunk_tokens)
        if self._prompt_room_blocks is not None:
            self._prompt_room_blocks -= job.held_blocks - held

    def _room_tokens(self, job: Job) -> int:
        return job.end_tokens - job.computed_tokens
