"""What the witness of a live run makes of what it hears."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from bench.cli import main
from bench.live.dgfm.contest import figures_of, table_of
from bench.live.dgfm.live import (
    KV_BLOCKS,
    LOADS,
    LONGEST_TOKENS,
    WORKERS,
    LiveRun,
    Step,
    _Witness,
    bodies,
    settings,
)
from shared.messages.plans import WorkerStepped
from tests.services.ledger.builders import report


def stepped(plan: int, done: int, step_s: float = 0.01) -> WorkerStepped:
    return WorkerStepped(
        worker_id="w0",
        incarnation=1,
        seq=1,
        epoch=1,
        plan_seq=plan,
        steps_done=done,
        plan_over=False,
        decoded_tokens=7,
        step_s=step_s,
    )


def heard(borrowed: int, idle: int) -> _Witness:
    witness = _Witness()
    witness.on_reported(report("w0", total=20, free=4, borrowed=borrowed, borrowed_free=idle))
    witness.begin()
    return witness


def test_a_step_is_remote_where_borrowed_blocks_are_in_use() -> None:
    witness = heard(borrowed=3, idle=1)
    witness.on_stepped(stepped(plan=1, done=2))
    witness.on_stepped(stepped(plan=1, done=6))
    witness.on_stepped(stepped(plan=2, done=1))
    witness.on_stepped(stepped(plan=2, done=1, step_s=0.0))
    assert [(one.steps, one.is_remote) for one in witness.steps] == [(2, True), (4, True), (1, True)]
    assert sum(tokens for _, tokens in witness.decoded) == 28
    assert witness.used_blocks() == (2, 16)


def test_idle_borrowed_blocks_make_no_step_remote() -> None:
    witness = heard(borrowed=3, idle=3)
    witness.on_stepped(stepped(plan=1, done=1))
    assert [one.is_remote for one in witness.steps] == [False]
    assert witness.used_blocks()[0] == 0


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


def test_rates_and_shares_of_a_part_of_a_run() -> None:
    run = LiveRun(10.0, [(0.5, 10), (6.0, 30), (9.0, 20)], [(1.0, 5, 10), (6.0, 0, 30)], 3, [], {})
    assert run.tok_s() == 6.0
    assert run.tok_s(5.0) == 10.0
    assert run.remote_share() == 0.125
    assert run.remote_share(5.0) == 0.0
    assert run.remote_share(20.0) == 0.0


def test_steps_count_as_many_as_were_run() -> None:
    steps = [
        Step(1.0, True, 5, 0.9),
        Step(6.0, True, 1, 0.04),
        Step(7.0, True, 3, 0.08),
        Step(8.0, False, 4, 0.01),
    ]
    run = LiveRun(10.0, [], [], 1, [], {}, steps)
    assert abs(run.step_s(5.0, is_remote=True) - 0.07) < 1e-12
    assert run.step_s(5.0, is_remote=False) == 0.01
    assert run.step_s(9.0, is_remote=False) == 0.0
    assert run.remote_steps(5.0) == 0.5


def test_sides_get_the_same_requests_and_differ_in_two_settings() -> None:
    first, again = (list(islice(bodies(Random("r"), 500, 0.06), 200)) for _ in range(2))
    assert first == again
    lengths = [len(body["prompt"]) for body in first]
    assert 0 < sum(length >= 500 for length in lengths) < 40
    assert max(len(body["prompt"]) + body["max_tokens"] for body in first) <= LONGEST_TOKENS
    off, on = settings(settles=False, recalls=False), settings(settles=True, recalls=True)
    assert {key for key in off if off[key] != on[key]} == {"worker.lending.recall", "ledger.settle"}


def test_without_documents_there_are_none_and_debts_fit_what_is_lent() -> None:
    assert max(len(body["prompt"]) for body in islice(bodies(Random(1), 500, 0.0), 100)) < 500
    fraction = settings(settles=True, recalls=True)["worker.lending.max_lent_fraction"]
    lent_at_most = KV_BLOCKS * float(str(fraction))
    for load in LOADS.values():
        assert load.wanted_blocks <= lent_at_most * (WORKERS - 1)
