"""Slots of a host: how many, how long, and what becomes of them when somebody leaves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.contract import Task
from services.scheduler.policy.ecoserve.hosting import (
    Lodging,
    free_guests,
    limit_tokens,
    lodge,
    move_out,
    open_slots,
)
from services.scheduler.policy.job_table import Job

BLOCK_TOKENS = 4


def lodging_of(name: str, held: int, own: int) -> Lodging:
    task = Task((name, 0), held * BLOCK_TOKENS, 1000, 0.0)
    return Lodging(Job(task, 1, None, computed_tokens=held * BLOCK_TOKENS, held_blocks=held, own_blocks=own))


def spans(host: Lodging) -> list[tuple[int, int, int]]:
    return [(slot.start, slot.end, slot.level) for slot in host.slots]


def test_a_host_has_a_right_half_a_second_quarter_and_a_second_eighth() -> None:
    host = lodging_of("host", 3, 3 + 16)
    open_slots(host)
    assert spans(host) == [(3 + 2, 3 + 4, 3), (3 + 4, 3 + 8, 2), (3 + 8, 3 + 16, 1)]


def test_one_two_and_four_slots_in_all() -> None:
    """Russian dolls: the same inside every guest, to level 3."""
    host = lodging_of("host", 0, 64)
    open_slots(host)
    levels = []
    pending = [host]
    while pending:
        lodging = pending.pop()
        for slot in lodging.slots:
            levels.append(slot.level)
            guest = lodging_of("guest", 1, 1)
            lodge(lodging, slot, guest, slot.end - slot.start)
            open_slots(guest)
            pending.append(guest)
    assert sorted(levels) == [1, 2, 2, 3, 3, 3, 3]


def test_limits_leave_a_buffer_and_shrink_as_the_host_goes_on() -> None:
    host = lodging_of("host", 2, 2 + 16)
    open_slots(host)
    right, quarter = host.slots[-1], host.slots[-2]
    # 8 blocks of 4 tokens to go until the right half, less ceil(0.15 * 64 / 2) = 5: 27 tokens, 6 blocks
    assert limit_tokens(host, right, 0.15, BLOCK_TOKENS) == 24
    # 16 tokens less ceil(0.15 * 64 / 4) = 3
    assert limit_tokens(host, quarter, 0.15, BLOCK_TOKENS) == 12
    host.job.computed_tokens += 10
    assert limit_tokens(host, right, 0.15, BLOCK_TOKENS) == 16
    host.job.computed_tokens += 100
    assert limit_tokens(host, right, 0.15, BLOCK_TOKENS) == 0


@given(blocks=st.integers(0, 300), buffer=st.floats(0, 1), tokens=st.integers(0, 300))
def test_no_limit_is_negative_or_longer_than_its_slot(blocks: int, buffer: float, tokens: int) -> None:
    host = lodging_of("host", 1, 1 + blocks)
    open_slots(host)
    host.job.computed_tokens += tokens
    for slot in host.slots:
        limit = limit_tokens(host, slot, buffer, BLOCK_TOKENS)
        assert 0 <= limit <= (slot.end - slot.start) * BLOCK_TOKENS and limit % BLOCK_TOKENS == 0
        assert host.job.computed_tokens + limit <= slot.start * BLOCK_TOKENS or limit == 0


def nested() -> tuple[Lodging, Lodging, Lodging]:
    """A guest of 8 blocks in the host's right half, and one of 4 in that."""
    host, guest, inner = lodging_of("host", 0, 16), lodging_of("guest", 2, 2), lodging_of("inner", 1, 1)
    open_slots(host)
    lodge(host, host.slots[-1], guest, 8)
    open_slots(guest)
    lodge(guest, guest.slots[-1], inner, 4)
    return host, guest, inner


def test_a_host_that_ends_leaves_its_range_to_its_guest() -> None:
    host, guest, inner = nested()
    assert free_guests(host) == [guest] and host.slots == []
    assert inner.host is guest, "guests of guests stay where they are"


def test_a_guest_that_ends_leaves_its_slot_to_its_own_guest() -> None:
    host, guest, inner = nested()
    assert move_out(guest) == []
    assert inner.host is host and guest.host is None and guest.job.hosted_blocks == 0
    # the right half [8, 16): open again up to the inner one, who had the last 4 of 8
    assert spans(host)[-2:] == [(8, 12, 1), (12, 16, 2)]
    assert host.slots[-1].guest is inner and host.slots[-2].guest is None


@pytest.mark.parametrize(("taken", "owed"), [(3, 0), (5, 1), (7, 3)])
def test_what_the_host_has_taken_back_cannot_be_lent_on(taken: int, owed: int) -> None:
    """The guest made room for its host with `taken` blocks of the reserve before it left."""
    host, guest, inner = nested()
    slot = host.slots[-1]
    slot.start += taken
    guest.job.own_blocks += taken
    guest.job.hosted_blocks -= taken
    expected = [(inner, owed)] if owed else []
    assert move_out(guest) == expected
    last = host.slots[-1]
    assert last.guest is inner and last.start >= 8 + taken and last.end == 16
    assert last.end - last.start == 4 - owed
