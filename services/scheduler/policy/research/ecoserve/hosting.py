"""KVC pipelining: what a running job will need last is lent to others that will be gone by then.

A host's new blocks (those it starts with beyond what it holds) are halved: the right half is a slot, the
left half's second quarter another, and so on; the same inside every guest (Russian dolls), to level 3: one,
two and four slots. A slot can take a guest that ends before its host has filled everything to the left of
it, less a buffer of β of the host's length halved as often. With paged blocks no block has a place of its
own: positions are accounting, and whoever needs a block next gets any free one.

    A host holds 3 blocks and starts with 16 more → slots [5, 7) level 3, [7, 11) level 2, [11, 19) level 1.
    β = 0.15, 4 tokens a block: one in [11, 19) must end within (11 − 3)·4 − ceil(0.15·64 / 2) = 27 tokens,
    that is 6 whole blocks. Once the host has filled block 10, a guest that is still there is in its way.

A guest that is in the way gets a block of the reserve for each block its host takes; without one it is
preempted, and its own guests move into its place. A guest that is complete, but not yet known to be over, is
waited for instead: the host skips a step.

Source: papers/003 §3.4; the number of slots, their limits and what happens at early ends: algorithms.md §1.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil
from typing import Any

from services.scheduler.policy.batch_builder import Job, JobStage, JobTable
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey

MAX_LEVEL = 3
_CANDIDATES = 8
"""So many of the closest lengths below a slot's limit are compared by their deadlines."""


@dataclass(slots=True, eq=False)
class Slot:
    """Blocks [start, end) of a host, counted like the blocks it holds: free for a guest until it gets
    there."""

    start: int
    end: int
    level: int
    guest: "Lodging | None" = None


@dataclass(slots=True, eq=False)
class Lodging:
    """A job as a host and as a guest."""

    job: Job
    host: "Lodging | None" = None
    slots: list[Slot] = field(default_factory=list)
    """Those it offers, lowest first; each with at most one guest."""
    new_blocks: int = 0
    """What it was given at its start beyond what it held: what its slots are cut from."""
    level: int = 0
    """How deep it is hosted; 0 is not at all."""


def open_slots(host: Lodging) -> None:
    """Cut what it was just given into slots, the lowest first; inside a guest from its own level on."""
    base, blocks = host.job.held_blocks, max(0, host.job.reserved_blocks - host.job.held_blocks)
    host.new_blocks, host.slots = blocks, []
    for halvings in range(MAX_LEVEL - host.level, 0, -1):
        start = base + -(-blocks // (1 << halvings))
        end = base + -(-blocks // (1 << (halvings - 1)))
        if start < end:
            host.slots.append(Slot(start, end, host.level + halvings))


def limit_tokens(host: Lodging, slot: Slot, buffer: float, block_tokens: int) -> int:
    """A guest with that many tokens to go, whole blocks, ends in time: what its host has to go until it
    arrives, less the buffer b_k = ceil(β·l / 2^k)."""
    halvings = max(1, slot.level - host.level)
    margin = ceil(buffer * host.new_blocks * block_tokens / (1 << halvings))
    left = slot.start * block_tokens - host.job.computed_tokens - margin
    return max(0, min(left // block_tokens, slot.end - slot.start)) * block_tokens


def lodge(host: Lodging, slot: Slot, guest: Lodging, blocks: int) -> None:
    """`guest` is lent `blocks` of the slot."""
    assert slot.guest is None and 0 < blocks <= slot.end - slot.start
    slot.guest, guest.host, guest.level, guest.job.hosted_blocks = guest, host, slot.level, blocks


def stand_alone(guest: Lodging) -> None:
    """What it was lent is its own; whoever calls this sees to it that there is as much."""
    guest.host, guest.level, guest.job.hosted_blocks = None, 0, 0


def free_guests(host: Lodging) -> list[Lodging]:
    """`host` is nobody's guest, and grows no more: its guests, none of them hosted any more."""
    guests = [slot.guest for slot in host.slots if slot.guest is not None]
    host.slots = []
    return guests


def move_out(leaving: Lodging) -> list[tuple[Lodging, int]]:
    """`leaving` leaves its host, and its guests move up into its place; the rest of that is open again.

    Returns guests with blocks that their new host cannot lend, as it has grown into them already: these
    have to be their own, out of what the leaving one gives up.
    """
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
    leaving.slots = []
    stand_alone(leaving)
    return owed


def _rest_rank(job: Job) -> tuple[Any, ...]:
    return (job.rest_tokens, job.task.order)


class Hosting:
    """Who is whose guest at one worker, and who may become one. Where nobody opens slots, nobody ever is."""

    def __init__(self, table: JobTable, buffer: float) -> None:
        self._table = table
        self._buffer = buffer
        self.lodgings: dict[SequenceKey, Lodging] = {}
        """Of all that have opened slots or been lodged."""
        self._by_rest: Line[Job] = Line(_rest_rank)
        """Ready jobs that are nobody's guests."""

    def _of(self, job: Job) -> Lodging:
        """Its lodging, made where there is none yet."""
        return self.lodgings.setdefault(job.task.key, Lodging(job))

    def is_guest(self, job: Job) -> bool:
        lodging = self.lodgings.get(job.task.key)
        return lodging is not None and lodging.host is not None

    def note_ready(self, job: Job) -> None:
        """It may be lodged from now on."""
        if not self.is_guest(job):
            self._by_rest.add(job)

    def note_taken(self, job: Job) -> None:
        """It is not ready any more; or it never was."""
        self._by_rest.discard(job)

    def open_slots(self, job: Job) -> None:
        """It has just been given blocks that others may use meanwhile."""
        open_slots(self._of(job))

    def forget(self, job: Job) -> None:
        """It has ended, and parted from all."""
        self.lodgings.pop(job.task.key, None)

    def clear(self) -> None:
        """Nobody is lent anything any more; what each owns is settled by the caller."""
        for lodging in self.lodgings.values():
            lodging.job.hosted_blocks = 0
        self.lodgings.clear()

    def room_blocks(self, job: Job) -> int:
        """Blocks until `job` gets to a slot with a guest, or to the end of what it may use."""
        lodging = self.lodgings.get(job.task.key)
        slots = lodging.slots if lodging is not None else []
        return min([job.reserved_blocks, *(slot.start for slot in slots if slot.guest is not None)])

    # Guests come

    def fill(
        self,
        running: dict[SequenceKey, Job],
        most_running: int,
        blocks_of: Callable[[Job], int],
        start: Callable[[Job], None],
    ) -> None:
        """Lodge ready jobs in slots, largest limit first, until the shortest is too long for all of them.

        `blocks_of`: what a job needs in all; `start`: a guest runs from now on.
        """
        slots: list[tuple[int, int, Lodging, Slot]] = []
        if not len(self._by_rest) or len(running) >= most_running:
            return
        for job in running.values():
            self._offer(slots, self._of(job), len(slots))
        heapify(slots)
        while slots and len(running) < most_running:
            negative_limit, _, host, slot = heappop(slots)
            shortest = self._by_rest.first()
            if shortest is None or shortest.rest_tokens > -negative_limit:
                return
            guest = self._recipient(-negative_limit, blocks_of)
            if guest is not None:
                lodging = self._of(guest)
                lodge(host, slot, lodging, blocks_of(guest) - guest.own_blocks)
                start(guest)
                open_slots(lodging)
                offered: list[tuple[int, int, Lodging, Slot]] = []
                self._offer(offered, lodging, len(slots) + len(running) * 8)
                for item in offered:
                    heappush(slots, item)

    def _offer(self, slots: list[tuple[int, int, Lodging, Slot]], host: Lodging, number: int) -> None:
        """Numbered on from `number`: equal limits are taken in that order."""
        for slot in host.slots:
            if slot.guest is None:
                limit = limit_tokens(host, slot, self._buffer, self._table.block_tokens)
                if limit > 0:
                    slots.append((-limit, number, host, slot))
                    number += 1

    def _recipient(self, limit: int, blocks_of: Callable[[Job], int]) -> Job | None:
        """Of the closest below the limit, the one with the loosest deadline."""
        blocks = limit // self._table.block_tokens
        best: Job | None = None
        for job in islice(self._by_rest.downwards_from((limit + 1,)), _CANDIDATES):
            fits = 0 < blocks_of(job) - job.own_blocks <= blocks
            if fits and (best is None or job.slack_class > best.slack_class):
                best = job
        return best

    # Hosts arrive

    def vacate(self, job: Job, blocks: int, evict: Callable[[Job], None]) -> bool:
        """Whether the host has its first `blocks` blocks to itself. Who is in its way gets a reserve block
        for each, or goes (`evict`); False while it waits for one that is complete."""
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
        """One of the blocks the guest is lent becomes the host's again, for one of the reserve."""
        slot.start += 1
        self._give_own(guest, 1)
        if guest.host is None:
            host.slots.remove(slot)

    # They part

    def leave_host(self, job: Job) -> None:
        """A guest is one no longer. Its own guests move up; what cannot be lent to them any more they own."""
        if self.is_guest(job):
            for guest, blocks in move_out(self.lodgings[job.task.key]):
                self._give_own(guest, blocks)

    def give_back_unused(self, job: Job) -> None:
        """A host that needs no more than it holds: its guests own their ranges now. A hosted host keeps its
        guests until its own host takes them over."""
        if not self.is_guest(job):
            self._table.set_own(job, job.held_blocks)
            lodging = self.lodgings.get(job.task.key)
            for guest in free_guests(lodging) if lodging is not None else ():
                self._give_own(guest, guest.job.hosted_blocks)

    def _give_own(self, guest: Lodging, blocks: int) -> None:
        """So many of those it is lent are its own from now on."""
        guest.job.hosted_blocks -= blocks
        self._table.set_own(guest.job, guest.job.own_blocks + blocks)
        if not guest.job.hosted_blocks:
            stand_alone(guest)

    def check_integrity(self, ready: Iterable[Job]) -> None:
        """Raises AssertionError when slots overlap, or a guest and its host do not know each other."""
        self._by_rest.check_integrity()
        alone = {id(job) for job in ready if not self.is_guest(job)}
        assert {id(job) for job in self._by_rest} <= alone
        assert all(self._table.jobs.get(key) is lodging.job for key, lodging in self.lodgings.items())
        for job in self._table.jobs.values():
            lodging = self.lodgings.get(job.task.key, Lodging(job))
            assert (lodging.host is None) == (job.hosted_blocks == 0) == (lodging.level == 0)
            if lodging.host is not None:
                assert sum(slot.guest is lodging for slot in lodging.host.slots) == 1, (
                    "a guest without a slot"
                )
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
