"""Placement operations per second on a fixed mix, and their growth with the number of GPUs.

Long conversations of a trace arrive at a steady load, grow at decoding speed, and end. Arrivals, ends, and
growths that change the size class or move something are counted and timed.
"""

import heapq
import itertools
import random
import time
from dataclasses import dataclass

from bench.simulated.placement.jobs import BLOCK_TOKENS, Hardware, Job
from services.placement.policy import create_packing
from services.placement.policy.mell import Mell
from services.placement.policy.mell.cluster import class_of, is_crumb

GROWTH_BLOCKS = 8
"""Blocks allocated at a time."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Result for one number of GPUs."""

    asked: int
    """Load in full GPUs."""
    gpus: int
    """Active GPUs."""
    requests: int
    operations: int
    ops_per_s: float


class Churn:
    """A policy kept at a load of `gpus` full GPUs by arrivals and ends of random `jobs`."""

    def __init__(self, hardware: Hardware, jobs: list[Job], gpus: int, seed: int) -> None:
        self.capacity = hardware.capacity_blocks
        self._hardware = hardware
        self._jobs = jobs
        self._draw = random.Random(f"{seed}/churn/{gpus}")
        self.policy = create_packing("mell", self.capacity)
        assert isinstance(self.policy, Mell)
        for index in range(2 * gpus + 64):
            self.policy.add_worker(f"w{index:06d}")
        self._events: list[tuple[float, int]] = []
        self._living: dict[int, tuple[Job, float, int]] = {}
        self._next = 0
        self._spent_s, self._counted = 0.0, 0
        mean_blocks_s = sum(self._blocks_s(job) for job in jobs) / len(jobs)
        self._gap_s = mean_blocks_s / (gpus * self.capacity)
        self._gpus = gpus
        self._fill(gpus)

    def run(self, operations: int) -> Speed:
        """Run the next `operations` counted operations."""
        self._spent_s, self._counted = 0.0, 0
        while self._counted < operations:
            self._step()
        rate = self._counted / self._spent_s
        return Speed(self._gpus, self.policy.active_workers, len(self._living), self._counted, rate)

    def _blocks_s(self, job: Job) -> float:
        """Return a job's mean size times its duration."""
        mean_tokens = job.prompt_tokens + job.output_tokens / 2
        return mean_tokens / BLOCK_TOKENS * job.runs_s(self._hardware.tokens_per_s)

    def _fill(self, gpus: int) -> None:
        """Add jobs at random ages until the load is reached, weighted by their size times duration."""
        weights = list(itertools.accumulate(self._blocks_s(job) for job in self._jobs))
        total, speed = 0, self._hardware.tokens_per_s
        while total < gpus * self.capacity:
            (job,) = self._draw.choices(self._jobs, cum_weights=weights)
            total += self._arrive(job, -self._draw.random() * job.runs_s(speed))
        heapq.heappush(self._events, (0.0, -1))

    def _arrive(self, job: Job, at_s: float) -> int:
        request, self._next = self._next, self._next + 1
        blocks = self._allocated(job, -min(0.0, at_s))
        self._living[request] = (job, at_s, blocks)
        start = time.thread_time()
        self.policy.allocate(request, blocks)
        self._note(start)
        self._schedule(request, max(at_s, 0.0))
        return blocks

    def _allocated(self, job: Job, running_s: float) -> int:
        blocks = job.blocks_at(running_s, self._hardware.tokens_per_s)
        return min(self.capacity, -(-blocks // GROWTH_BLOCKS) * GROWTH_BLOCKS)

    def _schedule(self, request: int, now_s: float) -> None:
        job, at_s, _ = self._living[request]
        step_s = GROWTH_BLOCKS * BLOCK_TOKENS / self._hardware.tokens_per_s
        ends_s = at_s + job.runs_s(self._hardware.tokens_per_s)
        heapq.heappush(self._events, (min(now_s + step_s, max(ends_s, now_s)), request))

    def _step(self) -> None:
        now_s, request = heapq.heappop(self._events)
        if request < 0:
            self._arrive(self._draw.choice(self._jobs), now_s)
            heapq.heappush(self._events, (now_s + self._draw.expovariate(1.0) * self._gap_s, -1))
            return
        job, at_s, blocks = self._living[request]
        if now_s >= at_s + job.runs_s(self._hardware.tokens_per_s):
            del self._living[request]
            start = time.thread_time()
            self.policy.end(request)
            self._note(start)
            return
        grown = max(blocks, self._allocated(job, now_s - at_s))
        self._living[request] = (job, at_s, grown)
        start = time.thread_time()
        effects = self.policy.grow(request, grown)
        if effects.moves or self._class(grown) != self._class(blocks):
            self._note(start)
        self._schedule(request, now_s)

    def _class(self, blocks: int) -> int:
        return -1 if is_crumb(blocks, self.capacity) else class_of(blocks, self.capacity)

    def _note(self, start: float) -> None:
        self._spent_s += time.thread_time() - start
        self._counted += 1
