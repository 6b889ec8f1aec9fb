"""The cheaper of queries and keys travels, and a creditor lends a share of its time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.attention.core.cost import (
    ComputeBudget,
    CreditorSpeeds,
    ShipMode,
    Work,
    choose_mode,
    fetch_s,
    ship_s,
)
from services.worker.peers.core.neighbours import LinkRate

KV_BYTES, Q_BYTES = 2 * 8 * 128 * 4, 32 * (2 * 128 + 1) * 4
"""Bytes per token, in a layer of 8 KV and 32 query heads of dimension 128."""


def work(rows: int, context_tokens: int) -> Work:
    return Work(rows * Q_BYTES, context_tokens * KV_BYTES, rows * context_tokens * 32)


@pytest.mark.parametrize(
    ("rows", "context_tokens", "mode"),
    [
        pytest.param(1, 8192, ShipMode.SHIP, id="a decode over a long context"),
        pytest.param(512, 64, ShipMode.FETCH, id="a long chunk over a short context"),
        pytest.param(256, 0, ShipMode.FETCH, id="a chunk whose context is all its own"),
    ],
)
def test_the_cheaper_way_is_taken(rows: int, context_tokens: int, mode: ShipMode) -> None:
    assert choose_mode(work(rows, context_tokens), CreditorSpeeds()) is mode


def test_a_slow_creditor_is_not_asked_to_compute() -> None:
    speeds = CreditorSpeeds()
    chunk = work(128, 4096)
    for _ in range(40):
        speeds.on_shipped(chunk, elapsed_s=2.0, compute_s=1.9)
        speeds.on_attended(chunk.pairs, 0.05)
    assert choose_mode(chunk, speeds) is ShipMode.FETCH


def test_a_fetch_hidden_behind_a_layer_costs_nothing() -> None:
    speeds, chunk = CreditorSpeeds(), work(64, 512)
    before_s = fetch_s(chunk, speeds)
    for _ in range(40):
        speeds.on_layer(1.0)
    assert fetch_s(chunk, speeds) == chunk.pairs * speeds.own_pair_s < before_s


def test_bandwidth_is_measured_by_large_fetches_only() -> None:
    speeds = CreditorSpeeds()
    for _ in range(60):
        speeds.on_fetched(1 << 26, 0.0131 + speeds.round_trip_s)
        speeds.on_fetched(100, 5.0)
    assert 4.5e9 < speeds.bytes_per_s < 5.5e9
    assert CreditorSpeeds(speeds.link).bytes_per_s == speeds.bytes_per_s, "shared by all users of the link"


def test_a_round_trip_excludes_transfer_and_compute_time() -> None:
    speeds, decode = CreditorSpeeds(LinkRate(1e12)), work(1, 100)
    for _ in range(60):
        speeds.on_shipped(decode, elapsed_s=0.003, compute_s=0.002)
    assert 0.0009 < speeds.round_trip_s < 0.0011
    assert abs(ship_s(decode, speeds) - 0.003) < 1e-4


def test_a_busy_worker_lends_its_fraction_of_time() -> None:
    budget, now_s, lent_s = ComputeBudget(0.25, burst_s=0.1), 0.0, 0.0
    while now_s < 100:
        if budget.may_compute(now_s, is_busy=True):
            budget.on_computed(0.02, is_busy=True)
            lent_s += 0.02
        now_s += 0.01
    assert 0.24 < lent_s / 100 < 0.26


def test_an_idle_worker_always_computes_unless_it_lends_no_time() -> None:
    budget = ComputeBudget(0.01)
    for step in range(100):
        assert budget.may_compute(step * 0.01, is_busy=False)
        budget.on_computed(0.01, is_busy=False)
    assert not ComputeBudget(0.0).may_compute(0.0, is_busy=False)


@given(
    st.floats(0.05, 1.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 0.2), st.booleans()), max_size=60),
)
def test_lent_time_is_bounded_by_fraction_burst_and_one_request(
    fraction: float, events: list[tuple[float, float, bool]]
) -> None:
    budget, now_s, lent_s, longest_s = ComputeBudget(fraction, burst_s=0.1), 0.0, 0.0, 0.0
    for pause_s, compute_s, is_busy in events:
        now_s += pause_s
        if budget.may_compute(now_s, is_busy=is_busy):
            budget.on_computed(compute_s, is_busy=is_busy)
            lent_s += compute_s if is_busy else 0.0
            longest_s = max(longest_s, compute_s)
        assert lent_s <= fraction * now_s + 0.1 + longest_s + 1e-9
