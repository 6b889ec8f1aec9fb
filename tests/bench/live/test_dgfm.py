"""What the witness of a live run makes of what it hears."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from bench.cli import main
from bench.live.dgfm import LONGEST_TOKENS, LiveRun, _Witness, bodies, figures_of, settings, table_of
from tests.services.ledger.builders import report


def heard(borrowed: int, idle: int) -> _Witness:
    witness = _Witness()
    witness.on_reported(report("w0", total=20, free=4, borrowed=borrowed, borrowed_free=idle))
    witness.begin()
    return witness


def test_borrowed_blocks_in_use_are_remote() -> None:
    assert heard(borrowed=3, idle=1).used_blocks() == (2, 16)
    assert heard(borrowed=3, idle=3).used_blocks()[0] == 0


COUNTS = {"settlements": 2, "settlements_aborted": 1, "settled_blocks": 7, "recalled_blocks": 3}


def run_of(tokens: int, remote: int) -> LiveRun:
    return LiveRun(10.0, [(1.0, 99), (5.0, tokens)], [(1.0, 9, 10), (5.0, remote, 100)], 4, [], COUNTS)


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
    assert figures["settled_blocks_on"] == 7
    assert "settlements_off" not in figures
    assert [row[:2] for row in table_of(results, 2.0).rows] == [
        (side, at) for side in results for at in range(2)
    ]


@pytest.mark.parametrize("flags", [["--duration-s", "2"], ["--seeds", "-1"]])
def test_flags_that_leave_nothing_are_refused(tmp_path: Path, flags: list[str]) -> None:
    assert main(["dgfm", "--live", *flags, "--out", str(tmp_path)]) == 2


def test_sides_get_the_same_requests_and_differ_in_two_settings() -> None:
    first, again = (list(islice(bodies(Random("r"), 500, 0.06), 200)) for _ in range(2))
    assert first == again
    lengths = [len(body["prompt"]) for body in first]
    assert 0 < sum(length >= 500 for length in lengths) < 40
    assert max(len(body["prompt"]) + body["max_tokens"] for body in first) <= LONGEST_TOKENS
    off, on = settings(settles=False, recalls=False), settings(settles=True, recalls=True)
    assert {key for key in off if off[key] != on[key]} == {"worker.lending.recall", "ledger.settle"}
