"""The figures of a live comparison, from runs that are made up; and flags that leave nothing to measure."""

from pathlib import Path

from bench.cli import main
from bench.dgfm.contest import _figures, _table
from bench.dgfm.live import LiveRun

COUNTS = {"settlements": 2, "settlements_aborted": 1, "settled_blocks": 7, "recalled_blocks": 3}


def run_of(tokens: int, remote: int) -> LiveRun:
    return LiveRun(10.0, [(1.0, 99), (5.0, tokens)], [(1.0, 9, 10), (5.0, remote, 100)], 4, [], COUNTS)


def test_the_start_does_not_count() -> None:
    results = {"off": run_of(80, 40), "cycles": run_of(88, 30), "on": run_of(96, 20)}
    figures = _figures(results, 2.0)
    assert figures["throughput_vs_off"] == 1.2
    assert figures["throughput_vs_off_cycles"] == 1.1
    assert [figures[f"remote_share_{side}"] for side in results] == [0.4, 0.3, 0.2]
    assert figures["settled_blocks_on"] == 7
    assert [row[0] for row in _table(results, 2.0).rows] == ["off", "cycles", "on"]


def test_a_run_too_short_is_refused(tmp_path: Path) -> None:
    assert main(["dgfm", "--live", "--duration-s", "2", "--out", str(tmp_path)]) != 0
