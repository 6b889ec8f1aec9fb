"""The figures of a live comparison, from runs that are made up; and flags that leave nothing to measure."""

from pathlib import Path

import pytest

from bench.cli import main
from bench.dgfm.contest import figures_of, table_of
from bench.dgfm.runs import LiveRun, Step

COUNTS = {"settlements": 2, "settlements_aborted": 1, "settled_blocks": 7, "recalled_blocks": 3}


def run_of(tokens: int, remote: int) -> LiveRun:
    steps = [Step(5.0, False, 3, 0.01), Step(5.0, True, 1, 0.04)]
    return LiveRun(10.0, [(1.0, 99), (5.0, tokens)], [(1.0, 9, 10), (5.0, remote, 100)], 4, [], COUNTS, steps)


def test_all_tokens_are_compared_and_the_start_does_not_count() -> None:
    results = {
        "off": [run_of(80, 40), run_of(160, 40)],
        "cycles": [run_of(88, 30), run_of(160, 30)],
        "on": [run_of(96, 20), run_of(240, 20)],
    }
    figures = figures_of(results, 2.0)
    assert figures["throughput_vs_off"] == pytest.approx(336 / 240)
    assert figures["throughput_vs_off_worst"] == pytest.approx(1.2)
    assert figures["throughput_vs_off_best"] == pytest.approx(1.5)
    assert figures["throughput_vs_off_cycles"] == pytest.approx(248 / 240)
    assert [figures[f"remote_share_{side}"] for side in results] == [0.4, 0.3, 0.2]
    assert (figures["step_ms_local"], figures["step_ms_remote"]) == pytest.approx((10.0, 40.0))
    assert (figures["remote_steps_on"], figures["settled_blocks_on"]) == (0.25, 7)
    assert "settlements_off" not in figures
    assert [row[:2] for row in table_of(results, 2.0).rows] == [
        (side, at) for side in results for at in range(2)
    ]


@pytest.mark.parametrize("flags", [["--duration-s", "2"], ["--seeds", "-1"]])
def test_flags_that_leave_nothing_are_refused(tmp_path: Path, flags: list[str]) -> None:
    assert main(["dgfm", "--live", *flags, "--out", str(tmp_path)]) == 2
