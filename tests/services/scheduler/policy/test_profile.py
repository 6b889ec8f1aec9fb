"""Usage over time: never more than it says, by simulation of every step; it contains the halving slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.profile import BUCKET_TOKENS, MAX_BUCKETS, UsageProfile, bucket_tokens

BLOCK_TOKENS = 4
Growing = tuple[int, int, int]


def growing_of(rest: int) -> st.SearchStrategy[Growing]:
    return st.tuples(st.integers(1, 200), st.integers(0, rest), st.integers(0, 3)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], -(-drawn[0] // BLOCK_TOKENS) + drawn[2])
    )


def most_used(growing: list[Growing], constant: int) -> int:
    """Step by step, with ends as predicted."""
    most = 0
    for step in range(max((end - now for now, end, _ in growing), default=0) + 1):
        used = constant
        for now, end, held in growing:
            if now + step <= end:
                used += max(held, -(-(now + step) // BLOCK_TOKENS))
        most = max(most, used)
    return most


@given(growing=st.lists(growing_of(150), max_size=8), constant=st.integers(0, 40), limit=st.integers(0, 300))
def test_what_it_admits_fits_at_every_step(growing: list[Growing], constant: int, limit: int) -> None:
    profile = UsageProfile([], constant, limit, BLOCK_TOKENS)
    admitted: list[Growing] = []
    for now, end, held in growing:
        before = profile.free_blocks
        waiting = UsageProfile(admitted, constant + held, limit, BLOCK_TOKENS)
        fits = waiting.fits(now, end, held)
        assert fits == waiting.which_fit([(now, end, held)])[0]
        assert (waiting.room_beside(now, end, held) >= 0) == fits
        if fits:
            admitted.append((now, end, held))
            waiting.start(now, end, held)
            assert waiting.free_blocks <= before or waiting.free_blocks >= 0
            profile = waiting
        assert not admitted or most_used(admitted, constant) <= limit


@given(growing=st.lists(growing_of(400), min_size=1, max_size=6), constant=st.integers(0, 40))
def test_starting_one_by_one_is_like_all_at_once(growing: list[Growing], constant: int) -> None:
    held = sum(item[2] for item in growing)
    one_by_one = UsageProfile([], constant + held, 1000, BLOCK_TOKENS)
    for item in growing:
        one_by_one.start(*item)
    at_once = UsageProfile(growing, constant, 1000, BLOCK_TOKENS)
    assert one_by_one.free_blocks == at_once.free_blocks


def test_one_that_ends_early_fits_into_what_another_needs_later() -> None:
    """A pipelined guest: exact allocations would refuse it."""
    host = (0, 640, 0)
    profile = UsageProfile([host], 0, 160, BLOCK_TOKENS)
    assert profile.fits(0, 256, 0) and not profile.fits(0, 384, 0)


def test_beyond_the_last_bucket_lengths_still_count() -> None:
    longest = BUCKET_TOKENS * MAX_BUCKETS
    profile = UsageProfile([], 10, 3000, BLOCK_TOKENS)
    assert profile.fits(0, longest, 0)
    assert not profile.fits(0, 2 * longest, 0)


@pytest.mark.parametrize(
    ("rests", "kv_tokens", "expected"),
    [
        ([], 1600, 32),
        ([400] * 30, 16 * 32 * 30, 32),
        ([400] * 31, 16 * 32 * 30, 16),
        ([60] * 136, 480 * 32, 4),
        ([60] * 135 + [2000], 480 * 32, 8),
        ([60] * 135 + [1 << 20], 480 * 32, 32),
    ],
)
def test_buckets_are_as_short_as_the_crowd_and_the_longest_allow(
    rests: list[int], kv_tokens: int, expected: int
) -> None:
    assert bucket_tokens(rests, kv_tokens) == expected
