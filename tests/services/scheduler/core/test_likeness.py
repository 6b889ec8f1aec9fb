"""Who serves what the others serve, who does not, and what becomes of those."""

from typing import Any

import pytest

from services.scheduler.core.fleet import mismatch, prevailing
from shared.errors import ModelMismatch
from shared.messages.reports import WorkerReported
from tests.services.scheduler.world import World
from tests.shared.messages.builders import worker_report

OTHER = "22" * 16


def report(worker_id: str, model: str = "m", weights: str = "aa") -> WorkerReported:
    return worker_report(worker_id, model=model, weights=weights)


def test_equal_names_and_weights_match_and_weights_not_told_match_any() -> None:
    assert mismatch(report("b"), []) is None
    assert mismatch(report("b"), [report("a")]) is None
    assert mismatch(report("b", weights=""), [report("a")]) is None


@pytest.mark.parametrize(
    ("fields", "says", "param"),
    [
        ({"weights": "bb"}, r"b and a both serve 'm'.*bb.*aa", "model"),
        ({"model": "n"}, "'n'.*'m'", "served_name"),
    ],
)
def test_other_weights_or_another_name_are_said_with_what_to_do(
    fields: dict[str, Any], says: str, param: str
) -> None:
    error = mismatch(report("b", **fields), [report("a")])
    assert isinstance(error, ModelMismatch) and error.param == param
    with pytest.raises(ModelMismatch, match=says):
        raise error


def test_what_most_serve_prevails_and_of_two_the_first() -> None:
    reports = [report("c"), report("b"), report("a", weights="bb")]
    assert (found := prevailing(reports)) is not None and found.weights == "aa"
    assert (found := prevailing(reports[1:])) is not None and found.worker_id == "a"
    assert prevailing([]) is None


def refused(world: World) -> dict[str, str]:
    """By worker, why."""
    assert world.core is not None
    return {row["worker"]: row["refused"] for row in world.core.describe()["workers"] if row.get("refused")}


def test_a_worker_with_other_weights_gets_no_work_until_the_others_are_gone() -> None:
    world = World(workers=2)
    world.start_worker("worker-9", weights=OTHER)
    requests = [world.submit(f"r{number}", 10, 20, 20) for number in range(8)]
    world.run_until(lambda: not world.unfinished(), limit_s=10.0)
    assert all(request.tokens == request.expected for request in requests)
    assert world.workers["worker-9"].step_tokens == []
    assert "different weights" in refused(world)["worker-9"]
    assert len(world.lines("RefuseWorker")) == 1, "said once, not at every heartbeat"
    for name in ("worker-0", "worker-1"):
        world.kill_worker(name)
    late = world.submit("late", 10, 20, 20)
    world.run_until(lambda: late.over, limit_s=10.0)
    assert late.tokens == late.expected and refused(world) == {}
    assert world.workers["worker-9"].step_tokens


def test_a_new_scheduler_sides_with_most_and_what_the_others_hold_is_resumed_elsewhere() -> None:
    world = World(workers=0)
    world.start_worker("worker-0", weights=OTHER)
    world.run_until(lambda: bool(world.lines("AskSnapshot")), limit_s=2.0)
    request = world.submit("a", 10, 60, 60)
    world.run_until(lambda: len(request.tokens) > 4, limit_s=3.0)
    world.kill_scheduler()
    world.start_worker("worker-1")
    world.start_worker("worker-2")
    world.start_scheduler()
    world.run_until(lambda: request.over, limit_s=15.0)
    assert set(refused(world)) == {"worker-0"}
    assert request.attempt == 2 and request.tokens == request.expected
