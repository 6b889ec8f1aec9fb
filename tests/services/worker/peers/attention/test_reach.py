"""The context announced: own KV and what others lend at most, steady while workers come and go."""

from services.worker.neighbourhood import Reach
from shared.messages.reports import Capacity, WorkerReported
from tests.shared.messages.builders import worker_report


def report(worker_id: str, most_lent: int, model: str = "m") -> WorkerReported:
    capacity = Capacity(total_blocks=40, free_blocks=0, most_lent_blocks=most_lent)
    return worker_report(worker_id, model=model, capacity=capacity)


def test_others_of_the_same_model_count_with_what_they_lend_at_most() -> None:
    reach = Reach("w0", "m", 640, 10_000)
    assert reach.context_tokens(0.0) == 640
    for sender in (report("w1", 20), report("w2", 30), report("w3", 9, model="other"), report("w0", 40)):
        reach.on_report(sender, 0.0)
    assert reach.context_tokens(0.0) == 640 + 50 * 16


def test_the_model_has_the_last_word() -> None:
    reach = Reach("w0", "m", 640, 1000)
    reach.on_report(report("w1", 40), 0.0)
    assert reach.context_tokens(0.0) == 1000


def test_a_restart_refuses_nobody_and_a_worker_that_stays_away_counts_no_more() -> None:
    reach = Reach("w0", "m", 640, 10_000)
    reach.on_report(report("w1", 40), 0.0)
    assert reach.context_tokens(0.0) == 1280
    assert reach.context_tokens(20.0) == 1280, "silent for a while"
    assert reach.context_tokens(40.0) == 640
    reach.on_report(report("w1", 40), 41.0)
    assert reach.context_tokens(41.0) == 1280
