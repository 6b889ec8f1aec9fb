"""The live side of the queue: its requests are the simulator's, and times count from when each was due."""

from pathlib import Path
from random import Random

import pytest

from bench.kit.load import Answer, LoadResult
from bench.simulated import queue_live
from services.scheduler.config import SchedulerConfig
from services.worker.engine.simulated import answer_tokens
from sim.case import requests_of
from sim.summary import ServiceLevel
from tests.bench.rig import context_of


def test_every_answer_has_a_seed_that_makes_it_as_long_as_the_trace_says(tmp_path: Path) -> None:
    source = queue_live.write_trace(tmp_path / "lengths.csv", Random(3))
    case = queue_live.case_of("by work", source, 2, rate=6.0, duration_s=30.0, seed=1)
    requests, dice = requests_of(case), Random(0)
    assert len(requests) == 180
    for request in requests:
        body = queue_live._body(request, dice)
        assert len(body["prompt"]) == request.prompt_tokens
        assert min(body["max_tokens"], answer_tokens(body["seed"], 0)) == request.output_tokens
        assert not body["ignore_eos"], "how long it gets is nothing that a policy could read from a request"


def test_sides_differ_in_the_queue_alone(tmp_path: Path) -> None:
    source = queue_live.write_trace(tmp_path / "lengths.csv", Random(3))
    ours, theirs = (queue_live.case_of(side, source, 2, 6.0, 30.0, 1) for side in queue_live.SIDES)
    assert requests_of(ours) == requests_of(theirs)
    assert (ours.queue, ours.places) != (theirs.queue, theirs.places)
    rules = SchedulerConfig(queue="arrival", feed_sequences=0).rules()
    assert (rules.queue, rules.feed_sequences) == (theirs.queue, theirs.places)


def test_times_count_from_when_a_request_was_due() -> None:
    """The client was late with the second: that is waiting, too."""
    answers = [
        Answer(10.0, [10.5], 12.0, completion_tokens=4),
        Answer(11.25, [12.0], 13.0, completion_tokens=2),
        Answer(12.0, [], 12.5, error="status 500"),
    ]
    served = queue_live._served(LoadResult(answers, 3.0), [0.0, 1.0, 2.0], speed=2.0)
    assert served == [queue_live.Served(1.0, 4.0, 4), queue_live.Served(2.0, 4.0, 2), None]
    figures = queue_live.measured([one for one in served if one], 5.0, ServiceLevel(0.5, 0.4, 2.0))
    assert figures == {
        "slo": 0.5,
        "normalized_s": 1.5,
        "wait_s": 1.5,
        "wait_s_p50": 1.0,
        "wait_s_p99": 2.0,
        "tokens_per_s": 6 / 5,
    }


@pytest.mark.slow
@pytest.mark.stack
def test_two_workers_serve_both_sides(tmp_path: Path) -> None:
    context = context_of("fleet", tmp_path, "--queue", "--live", "only", "--live-speed", "4")
    outcome = queue_live.run(context, [2], 6.0)
    assert outcome.failures == 0
    assert {"live_queue_slo_ratio_w2", "live_queue_simulated_slo_ratio_w2"} <= outcome.figures.keys()
