"""KVC pipelining: what a running sequence will need last is lent to others that will be gone by then.

A host's new blocks (those it starts with beyond what it holds) are halved: the right half is a slot, the
left half's second quarter another, and so on; the same inside every guest (Russian dolls), to level 3: one,
two and four slots. A slot can take a guest that ends before its host has filled everything to the left of
it, less a buffer of β of the host's length halved as often. With paged blocks no block has a place of its
own: positions are accounting, and whoever needs a block next gets any free one.

Here: which slots there are, who fits, and how hosts and guests part. Source: papers/003 §3.4; the number of
slots, their limits and what happens at early ends: algorithms.md §1.
"""

from math import ceil

from services.scheduler.policy.ecoserve.jobs import Job, Slot

MAX_LEVEL = 3


def open_slots(host: Job) -> None:
    """Cut what it was just given into slots, the lowest first; inside a guest from its own level on."""
    base, blocks = host.held_blocks, max(0, host.reserved_blocks - host.held_blocks)
    host.new_blocks, host.slots = blocks, []
    for halvings in range(MAX_LEVEL - host.level, 0, -1):
        start = base + -(-blocks // (1 << halvings))
        end = base + -(-blocks // (1 << (halvings - 1)))
        if start < end:
            host.slots.append(Slot(start, end, host.level + halvings))


def limit_tokens(host: Job, slot: Slot, buffer: float, block_tokens: int) -> int:
    """A guest with that many tokens to go, whole blocks, ends in time: what its host has to go until it
    arrives, less the buffer b_k = ceil(β·l / 2^k)."""
    halvings = max(1, slot.level - host.level)
    margin = ceil(buffer * host.new_blocks * block_tokens / (1 << halvings))
    left = slot.start * block_tokens - host.computed_tokens - margin
    return max(0, min(left // block_tokens, slot.end - slot.start)) * block_tokens


def lodge(host: Job, slot: Slot, guest: Job, blocks: int) -> None:
    """`guest` is lent `blocks` of the slot."""
    assert slot.guest is None and 0 < blocks <= slot.end - slot.start
    slot.guest, guest.host, guest.level, guest.hosted_blocks = guest, host, slot.level, blocks


def stand_alone(guest: Job) -> None:
    """What it was lent is its own; whoever calls this sees to it that there is as much."""
    guest.host, guest.level, guest.hosted_blocks = None, 0, 0


def free_guests(host: Job) -> list[Job]:
    """`host` is nobody's guest, and grows no more: its guests, none of them hosted any more."""
    guests = [slot.guest for slot in host.slots if slot.guest is not None]
    host.slots = []
    return guests


def move_out(job: Job) -> list[tuple[Job, int]]:
    """`job` leaves its host, and its guests move up into its place; the rest of that is open again.

    Returns guests with blocks that their new host cannot lend, as it has grown into them already: these
    have to be their own, out of what `job` gives up.
    """
    host = job.host
    assert host is not None
    slot = next(slot for slot in host.slots if slot.guest is job)
    shift = slot.start - job.own_blocks
    moved: list[Slot] = []
    owed: list[tuple[Job, int]] = []
    for inner in job.slots:
        guest = inner.guest
        if guest is None:
            continue
        lacking = min(guest.hosted_blocks, max(0, job.own_blocks - inner.start))
        start = inner.start + shift + lacking
        if lacking:
            owed.append((guest, lacking))
        if guest.hosted_blocks > lacking:
            moved.append(Slot(start, start + guest.hosted_blocks - lacking, inner.level, guest))
            guest.host = host
        else:
            guest.host, guest.level = None, 0
    end = moved[0].start if moved else slot.end
    opened = [Slot(slot.start, end, slot.level)] if slot.start < end else []
    at = host.slots.index(slot)
    host.slots[at : at + 1] = opened + moved
    job.slots = []
    stand_alone(job)
    return owed
