"""The live side's own parts; a whole stack is in `tests/bench/live/test_sim_check.py`."""

from bench.kit.load import Answer
from bench.live.chats import LiveRun, Tap, chat_bodies
from shared.messages.plans import WorkerStepped


def test_prompts_are_the_same_for_a_seed_and_have_one_limit() -> None:
    bodies = chat_bodies(30, 1, 99)
    assert bodies == chat_bodies(30, 1, 99)
    assert bodies != chat_bodies(30, 2, 99)
    assert {body["max_tokens"] for body in bodies} == {99}
    assert all(body["messages"][-1]["role"] == "user" for body in bodies)


def test_failures_are_counted() -> None:
    good = Answer(0.0, [1.0], 2.0, completion_tokens=4)
    silent = Answer(0.0, [], 2.0, completion_tokens=4)
    broken = Answer(0.0, [1.0], 2.0, completion_tokens=4, error="gone")
    assert LiveRun(0.0, [good, silent, broken], [], 99).failures == 2


def test_the_tap_notes_when() -> None:
    tap = Tap()
    event = WorkerStepped(
        worker_id="w", incarnation=1, seq=1, epoch=1, plan_seq=1, steps_done=1, plan_over=True
    )
    tap.on_stepped(event)
    tap.on_stepped(event)
    assert tap.steps[0][0] <= tap.steps[1][0]
