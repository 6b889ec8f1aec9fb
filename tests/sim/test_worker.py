"""One worker by a script: stretches, ends in mid-plan, plans made ahead and plans cut short."""

from services.scheduler.policy.contract import PlannedBatch
from sim.books import Held
from sim.meters import WorkerMeter
from sim.requests import ServedRecord, SimRequest
from sim.worker import SimWorker
from tests.sim.simple import OneSecond, Scripted, books, decode, prefill, request


def worker(script: list[PlannedBatch], *requests: SimRequest, ahead: int = 1) -> tuple[SimWorker, Scripted]:
    policy = Scripted(script)
    made = SimWorker(policy, books(), OneSecond(), WorkerMeter(), ahead)
    for one in requests:
        made.books.held[one.key] = Held(ServedRecord(one))
    return made, policy


def step(made: SimWorker, now_s: float) -> tuple[float, list[Held]]:
    """Plan, run to the end of the stretch."""
    made.next_plans(now_s)
    end = made.stretch_end()
    assert end is not None
    return end[0], made.advance(end[0])


def test_a_stretch_ends_with_the_first_answer() -> None:
    short, long = request(0, output=3), request(1, output=9)
    both = PlannedBatch(steps=4, decodes=decode(short, 4, 2).decodes + decode(long, 4, 2).decodes)
    start = PlannedBatch(prefills=prefill(short, 0, 4, 1).prefills + prefill(long, 0, 4, 1).prefills)
    made, policy = worker([start, both], short, long)
    now_s, _ = step(made, 0.0)
    assert now_s == 1.0
    now_s, ended = step(made, now_s)
    assert now_s == 3.0
    assert [held.record.request for held in ended] == [short]
    assert ("ended", (short.key, 3.0)) in policy.heard
    now_s, _ = step(made, now_s)
    assert now_s == 5.0, "the plan goes on without it, to its end"
    assert made.books.held[long.key].generated_tokens == 5


def test_the_next_plan_is_made_in_the_last_step_of_the_one_that_runs() -> None:
    one = request(output=12)
    script = [prefill(one, 0, 4, 1), decode(one, 4, 2), decode(one, 4, 4)]
    made, policy = worker(script, one, ahead=2)
    now_s, _ = step(made, 0.0)
    assert len(policy.script) == 1, "with two steps wanted, the decodes were planned while the prompt ran"
    now_s, _ = step(made, now_s)
    assert now_s == 4.0
    made.next_plans(now_s)
    assert policy.script == []


def test_an_arrival_cuts_a_long_plan_at_the_next_step() -> None:
    old, new = request(0, output=12), request(1)
    made, policy = worker([prefill(old, 0, 4, 1), decode(old, 4, 2)], old, new)
    now_s, _ = step(made, 0.0)
    made.next_plans(now_s)
    policy.script.append(prefill(new, 0, 4, 1))
    made.is_urgent = True
    made.next_plans(2.5)
    assert made.stretch_end() is not None
    end = made.stretch_end()
    assert end is not None
    assert end[0] == 3.0
    made.advance(3.0)
    assert ("short", (old.key, 2, 3.0)) in policy.heard
    made.next_plans(3.0)
    now_s, _ = step(made, 3.0)
    assert now_s == 4.0
    assert made.books.held[new.key].generated_tokens == 1
