"""KVC pipelining: lends the last blocks of running jobs to others that end before those are needed.

The right half of a host's new blocks is a slot, the left half's second quarter another, and so on, also
inside each guest, to level 3. Positions are only accounting. Source: papers/003 §3.4; algorithms.md §1.

    A host holds 3 blocks and starts with 16 more → slots [5, 7) level 3, [7, 11) level 2, [11, 19) level 1.
    β = 0.15, 4 tokens a block: one in [11, 19) must end within (11 − 3)·4 − ceil(0.15·64 / 2) = 27 tokens,
    that is 6 whole blocks. Once the host has filled block 10, a guest that is still there is in its way: it
    gets a reserve block for each block its host takes, or it is preempted and its guests move up.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil
from operator import attrgetter

from services.scheduler.policy.batch_builder import Job, JobStage, JobTable
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey

MAX_LEVEL = 3
_CANDIDATES = 8
"""Number of lengths below a slot's limit that are compared by deadline."""


@dataclass(slots=True, eq=False)
class Slot:
    """Blocks [start, end) of a host that a guest may use until the host gets there."""

    start: int
    end: int
    level: int
    guest: "Lodging | None" = None


@dataclass(slots=True, eq=False)
class Lodging:
    """A job's roles as host and guest."""

    job: Job
    host: "Lodging | None" = None
    slots: list[Slot] = field(default_factory=list)
    """Its slots, lowest first, each with at most one guest."""
    new_blocks: int = 0
    """Blocks beyond the held ones at its start, from which slots are cut."""
    level: int = 0
    """Depth of hosting; 0: not hosted."""


def open_slots(host: Lodging) -> None:
    """Cut the host's new blocks into slots, lowest first, from its own level on."""
    base, blocks = host.job.held_blocks, max(0, host.job.reserved_blocks - host.job.held_blocks)
    host.new_blocks, host.slots = blocks, []
    for halvings in range(MAX_LEVEL - host.level, 0, -1):
        start = base + -(-blocks // (1 << halvings))
        end = base + -(-blocks // (1 << (halvings - 1)))
        if start < end:
            host.slots.append(Slot(start, end, host.level + halvings))


def limit_tokens(host: Lodging, slot: Slot, buffer: float, block_tokens: int) -> int:
    """Return the longest guest for a slot, in tokens of whole blocks, with the paper's buffer b_k."""
    halvings = max(1, slot.level - host.level)
    margin = ceil(buffer * host.new_blocks * block_tokens / (1 << halvings))
    left = slot.start * block_tokens - host.job.computed_tokens - margin
    return max(0, min(left // block_tokens, slot.end - slot.start)) * block_tokens


def lodge(host: Lodging, slot: Slot, guest: Lodging, blocks: int) -> None:
    """Lend `blocks` blocks of the slot to `guest`."""
    assert slot.guest is None and 0 < blocks <= slot.end - slot.start
    slot.guest, guest.host, guest.level, guest.job.hosted_blocks = guest, host, slot.level, blocks


def move_out(leaving: Lodging) -> list[tuple[Lodging, int]]:
    """End the lodging of `leaving`; its guests move up into its place, and the rest becomes free slots.
    Return guests with the number of blocks that the new host took; the leaving job's replace them."""
    host, own_blocks = leaving.host, leaving.job.own_blocks
    assert host is not None
    slot = next(slot for slot in host.slots if slot.guest is leaving)
    shift = slot.start - own_blocks
    moved: list[Slot] = []
    owed: list[tuple[Lodging, int]] = []
    for inner in leaving.slots:
        guest = inner.guest
        if guest is None:
            continue
        lacking = min(guest.job.hosted_blocks, max(0, own_blocks - inner.start))
        start = inner.start + shift + lacking
        if lacking:
            owed.append((guest, lacking))
        if guest.job.hosted_blocks > lacking:
            moved.append(Slot(start, start + guest.job.hosted_blocks - lacking, inner.level, guest))
            guest.host = host
        else:
            guest.host, guest.level = None, 0
    end = moved[0].start if moved else slot.end
    opened = [Slot(slot.start, end, slot.level)] if slot.start < end else []
    at = host.slots.index(slot)
    host.slots[at : at + 1] = opened + moved
    leaving.slots, leaving.host, leaving.level, leaving.job.hosted_blocks = [], None, 0, 0
    return owed


class Hosting:
    """Hosts and guests at one worker. If no slots are opened, there are no guests."""

    def __init__(self, table: JobTable, buffer: float) -> None:
        self._table = table
        self._buffer = buffer
        self.lodgings: dict[SequenceKey, Lodging] = {}
        """All jobs that have opened slots or lodged."""
        self.by_rest: Line[Job] = Line(attrgetter("rest_tokens", "task.order"))
        """Ready jobs that are not guests."""

    def lodging_of(self, job: Job) -> Lodging:
        """Return the job's lodging, created if needed."""
        return self.lodgings.setdefault(job.task.key, Lodging(job))

    def is_guest(self, job: Job) -> bool:
        lodging = self.lodgings.get(job.task.key)
        return lodging is not None and lodging.host is not None

    def clear(self) -> None:
        """End all lending; the caller settles own blocks."""
        for lodging in self.lodgings.values():
            lodging.job.hosted_blocks = 0
        self.lodgings.clear()

    def room_blocks(self, job: Job) -> int:
        """Return the blocks up to the first slot with a guest, or to the reservation's end."""
        lodging = self.lodgings.get(job.task.key)
        slots = lodging.slots if lodging is not None else []
        return min([job.reserved_blocks, *(slot.start for slot in slots if slot.guest is not None)])

    def fill(
        self,
        running: dict[SequenceKey, Job],
        most_running: int,
        blocks_of: Callable[[Job], int],
        start: Callable[[Job], None],
    ) -> None:
        """Lodge ready jobs in the largest slots, until none fits. `start` is called with each guest."""
        slots: list[tuple[int, int, Lodging, Slot]] = []
        if not len(self.by_rest) or len(running) >= most_running:
            return
        for job in running.values():
            self._offer(slots, self.lodging_of(job), len(slots))
        heapify(slots)
        while slots and len(running) < most_running:
            negative_limit, _, host, slot = heappop(slots)
            shortest = self.by_rest.first()
            if shortest is None or shortest.rest_tokens > -negative_limit:
                return
            guest = self._recipient(-negative_limit, blocks_of)
            if guest is not None:
                lodging = self.lodging_of(guest)
                lodge(host, slot, lodging, blocks_of(guest) - guest.own_blocks)
                start(guest)
                open_slots(lodging)
                offered: list[tuple[int, int, Lodging, Slot]] = []
                self._offer(offered, lodging, len(slots) + len(running) * 8)
                for item in offered:
                    heappush(slots, item)

    def _offer(self, slots: list[tuple[int, int, Lodging, Slot]], host: Lodging, number: int) -> None:
        """Append the host's free slots, numbered from `number`; equal limits go in that order."""
        for slot in host.slots:
            if slot.guest is None:
                limit = limit_tokens(host, slot, self._buffer, self._table.block_tokens)
                if limit > 0:
                    slots.append((-limit, number, host, slot))
                    number += 1

    def _recipient(self, limit: int, blocks_of: Callable[[Job], int]) -> Job | None:
        """Return the job with the loosest deadline among the longest below the limit."""
        blocks = limit // self._table.block_tokens
        best: Job | None = None
        for job in islice(self.by_rest.irange_key(max_key=(limit + 1,), reverse=True), _CANDIDATES):
            fits = 0 < blocks_of(job) - job.own_blocks <= blocks
            if fits and (best is None or job.slack_class > best.slack_class):
                best = job
        return best

    def vacate(self, job: Job, blocks: int, evict: Callable[[Job], None]) -> bool:
        """Return whether the host's first `blocks` blocks are its own; guests get a reserve block or go."""
        host = self.lodgings.get(job.task.key)
        while host is not None and host.slots and host.slots[0].start < blocks:
            slot = host.slots[0]
            guest = slot.guest
            if guest is None:
                host.slots.pop(0)
            elif self._table.free_blocks > 0:
                self._step_aside(host, slot, guest)
            elif guest.job.stage is JobStage.COMPLETE:
                return False
            else:
                evict(guest.job)
        return True

    def _step_aside(self, host: Lodging, slot: Slot, guest: Lodging) -> None:
        """Give one lent block back to the host and one of the reserve to the guest."""
        slot.start += 1
        self._give_own(guest, 1)
        if guest.host is None:
            host.slots.remove(slot)

    def leave_host(self, job: Job) -> None:
        """End a guest's lodging. Its own guests move up and own what can no longer be lent."""
        if self.is_guest(job):
            for guest, blocks in move_out(self.lodgings[job.task.key]):
                self._give_own(guest, blocks)

    def give_back_unused(self, job: Job) -> None:
        """Drop an unhosted job's unused reservation; its guests own their blocks now."""
        if self.is_guest(job):
            return
        self._table.set_own(job, job.held_blocks)
        lodging = self.lodgings.get(job.task.key, Lodging(job))
        slots, lodging.slots = lodging.slots, []
        for slot in slots:
            if slot.guest is not None:
                self._give_own(slot.guest, slot.guest.job.hosted_blocks)

    def _give_own(self, guest: Lodging, blocks: int) -> None:
        """Turn `blocks` lent blocks into the guest's own."""
        guest.job.hosted_blocks -= blocks
        self._table.set_own(guest.job, guest.job.own_blocks + blocks)
        if not guest.job.hosted_blocks:
            guest.host, guest.level = None, 0

    def check_integrity(self, ready: Iterable[Job]) -> None:
        """Raises AssertionError when slots overlap, or a guest and its host disagree."""
        self.by_rest.check_integrity()
        alone = {id(job) for job in ready if not self.is_guest(job)}
        assert {id(job) for job in self.by_rest} <= alone
        assert all(self._table.jobs.get(key) is lodging.job for key, lodging in self.lodgings.items())
        for job in self._table.jobs.values():
            lodging = self.lodgings.get(job.task.key, Lodging(job))
            assert (lodging.host is None) == (job.hosted_blocks == 0) == (lodging.level == 0)
            if lodging.host is not None:
                places = sum(slot.guest is lodging for slot in lodging.host.slots)
                assert places == 1, "a guest without a slot"
            top = job.held_blocks
            for slot in lodging.slots:
                assert slot.start < slot.end <= job.reserved_blocks, "a slot of nothing"
                if slot.guest is not None:
                    assert top <= slot.start, "slots overlap, or the host is in one"
                    top = slot.end
                    guest = slot.guest
                    assert guest.host is lodging and guest.job.hosted_blocks <= slot.end - slot.start
                    runs = job.stage is JobStage.DECODING
                    assert lodging.host is not None or runs, "a guest of nobody"
