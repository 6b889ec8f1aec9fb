"""What is made of a run: rates, shares and step times of a part of it."""

from bench.dgfm.runs import LiveRun, Step


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
