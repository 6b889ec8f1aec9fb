"""Queries travel where that is cheaper, keys where that is; speeds follow what is measured."""

from services.worker.peers.attention.core.cost import (
    CreditorSpeeds,
    ShipMode,
    Work,
    choose_mode,
    fetch_s,
    ship_s,
)

KV_BYTES, Q_BYTES = 2 * 8 * 128 * 4, 32 * (2 * 128 + 1) * 4
"""Of a token, in a layer of 8 KV and 32 query heads of 128."""


def work(rows: int, context_tokens: int) -> Work:
    return Work(rows * Q_BYTES, context_tokens * KV_BYTES, rows * context_tokens * 32)


def test_a_decode_over_a_long_context_ships() -> None:
    assert choose_mode(work(1, 8192), CreditorSpeeds()) is ShipMode.SHIP


def test_a_long_chunk_over_a_short_context_fetches() -> None:
    assert choose_mode(work(512, 64), CreditorSpeeds()) is ShipMode.FETCH


def test_a_chunk_whose_context_is_all_its_own_is_computed_here() -> None:
    assert choose_mode(work(256, 0), CreditorSpeeds()) is ShipMode.FETCH


def test_a_slow_creditor_is_not_asked_to_compute() -> None:
    speeds = CreditorSpeeds()
    chunk = work(128, 4096)
    for _ in range(40):
        speeds.on_shipped(chunk, elapsed_s=2.0, compute_s=1.9)
        speeds.on_attended(chunk.pairs, 0.05)
    assert choose_mode(chunk, speeds) is ShipMode.FETCH


def test_what_hides_behind_a_layer_costs_nothing() -> None:
    speeds, chunk = CreditorSpeeds(), work(64, 512)
    before_s = fetch_s(chunk, speeds)
    for _ in range(40):
        speeds.on_layer(1.0)
    assert fetch_s(chunk, speeds) == chunk.pairs * speeds.own_pair_s < before_s


def test_bandwidth_is_learnt_from_large_fetches_only() -> None:
    speeds = CreditorSpeeds()
    for _ in range(60):
        speeds.on_fetched(1 << 26, 0.0131 + speeds.round_trip_s)
        speeds.on_fetched(100, 5.0)
    assert 4.5e9 < speeds.bytes_per_s < 5.5e9


def test_round_trips_are_what_neither_bytes_nor_computing_explains() -> None:
    speeds, decode = CreditorSpeeds(bytes_per_s=1e12), work(1, 100)
    for _ in range(60):
        speeds.on_shipped(decode, elapsed_s=0.003, compute_s=0.002)
    assert 0.0009 < speeds.round_trip_s < 0.0011
    assert abs(ship_s(decode, speeds) - 0.003) < 1e-4
