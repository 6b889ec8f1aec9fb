"""EcoServe with KVC pipelining: slots of those that run are lent to generations that will be gone in time.

A guest that is still there when its host arrives gets a block of the reserve for each block its host takes;
without one it is preempted, and its own guests move into its place. A guest that is complete, but not yet
known to be over, is waited for instead: the host skips a step.

Source: papers/003 §3.4; algorithms.md §1 (KVC pipelining). Slots are in `slots.py`.
"""

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.scheduler.policy.ecoserve.drafts import Draft
from services.scheduler.policy.ecoserve.jobs import Job, JobStage, Slot
from services.scheduler.policy.ecoserve.planner import DecoupledPolicy
from services.scheduler.policy.ecoserve.slots import limit_tokens, lodge, open_slots, stand_alone
from services.scheduler.policy.line import Line

_CANDIDATES = 8
"""So many of the closest lengths below a slot's limit are compared by their deadlines."""


def rest_rank(job: Job) -> tuple[Any, ...]:
    return (job.rest_tokens, job.task.order)


class HostingPolicy(DecoupledPolicy):
    """`ecoserve`. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        super().__init__(shape, settings)
        self._by_rest: Line[Job] = Line(rest_rank)
        """Generations that wait and are nobody's guests."""

    def _queue_generation(self, job: Job, now_s: float) -> None:
        super()._queue_generation(job, now_s)
        if job.host is None:
            self._by_rest.add(job)

    def _take_out(self, job: Job) -> None:
        self._by_rest.discard(job)
        super()._take_out(job)

    def _start(self, draft: Draft, job: Job, blocks: int) -> None:
        super()._start(draft, job, blocks)
        open_slots(job)

    def _admit_generations(self, draft: Draft, now_s: float) -> None:
        super()._admit_generations(draft, now_s)
        self._fill_slots(draft)

    def _fill_slots(self, draft: Draft) -> None:
        """Largest limit first, until the shortest that waits is too long for all of them."""
        slots: list[tuple[int, int, Job, Slot]] = []
        if not len(self._by_rest) or len(self._running) >= self._most_running():
            return
        for host in self._running.values():
            self._offer(slots, host)
        heapify(slots)
        while slots and len(self._running) < self._most_running():
            negative_limit, _, host, slot = heappop(slots)
            shortest = self._by_rest.first()
            if shortest is None or shortest.rest_tokens > -negative_limit:
                return
            guest = self._recipient(-negative_limit)
            if guest is not None:
                lodge(host, slot, guest, self._target_blocks(guest) - guest.own_blocks)
                self._take_out(guest)
                self._run(draft, guest)
                open_slots(guest)
                offered: list[tuple[int, int, Job, Slot]] = []
                self._offer(offered, guest, number=len(slots) + len(self._running) * 8)
                for item in offered:
                    heappush(slots, item)

    def _offer(self, slots: list[tuple[int, int, Job, Slot]], host: Job, number: int | None = None) -> None:
        number = len(slots) if number is None else number
        for slot in host.slots:
            if slot.guest is None:
                limit = limit_tokens(host, slot, self._options.buffer, self._block_tokens)
                if limit > 0:
                    slots.append((-limit, number, host, slot))
                    number += 1

    def _recipient(self, limit: int) -> Job | None:
        """Of the closest below the limit, the one with the loosest deadline."""
        blocks = limit // self._block_tokens
        best: Job | None = None
        for job in islice(self._by_rest.downwards_from((limit + 1,)), _CANDIDATES):
            fits = 0 < self._target_blocks(job) - job.own_blocks <= blocks
            if fits and (best is None or job.slack_class > best.slack_class):
                best = job
        return best

    def _vacate(self, draft: Draft, job: Job, blocks: int, now_s: float) -> bool:
        """The host arrives: who is in its way gets a reserve block for each, or goes."""
        while job.slots and job.slots[0].start < blocks:
            slot = job.slots[0]
            guest = slot.guest
            if guest is None:
                job.slots.pop(0)
            elif self._free_blocks > 0:
                self._step_aside(job, slot, guest)
            elif guest.stage is JobStage.COMPLETE:
                return False
            else:
                self._evict(draft, guest, now_s)
        return True

    def _step_aside(self, host: Job, slot: Slot, guest: Job) -> None:
        """One of the blocks the guest is lent becomes the host's again, for one of the reserve."""
        slot.start += 1
        guest.hosted_blocks -= 1
        self._set_own(guest, guest.own_blocks + 1)
        if guest.hosted_blocks == 0:
            stand_alone(guest)
            host.slots.remove(slot)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._by_rest.check_integrity()
        alone = {id(job) for job in self._generations if job.host is None}
        assert {id(job) for job in self._by_rest} <= alone
