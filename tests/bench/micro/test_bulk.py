"""`bench bulk` for real, with little data."""

from pathlib import Path

import pytest

from bench.micro.bulk import bench
from shared.errors import ConfigError
from tests.bench.rig import context_of


def test_measures_every_side_and_compares_tcp_with_a_bare_socket(tmp_path: Path) -> None:
    outcome = bench.run(context_of("bulk", tmp_path, "--mib", "1", "2", "--rounds", "2"))
    figures = outcome.figures
    for name in ("memcpy", "bare", "tcp", "shm"):
        assert figures[f"{name}_gb_s"] == figures[f"{name}_gb_s_2mib"] > 0
    assert 0 < figures["tcp_vs_limit"] < 20
    for name in ("tcp", "shm"):
        assert 0 < figures[f"{name}_round_trip_us_p50"] <= figures[f"{name}_round_trip_us_p99"]
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) >= 4 * 2 * 2


def test_refuses_sizes_beyond_what_the_peer_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        bench.run(context_of("bulk", tmp_path, "--mib", "512"))
