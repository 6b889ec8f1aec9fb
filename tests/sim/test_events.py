"""Order of events, and that time does not go back."""

import pytest

from sim.events import EventQueue, Priority


def test_time_then_priority_then_order_of_pushing() -> None:
    queue: EventQueue[str] = EventQueue()
    queue.push(2.0, Priority.STEP, "late")
    queue.push(1.0, Priority.PLAN, "plan")
    queue.push(1.0, Priority.ARRIVAL, "first")
    queue.push(1.0, Priority.ARRIVAL, "second")
    queue.push(1.0, Priority.STEP, "step")
    assert [queue.pop()[1] for _ in range(len(queue))] == ["step", "first", "second", "plan", "late"]
    assert queue.now_s == 2.0


def test_the_past_is_refused() -> None:
    queue: EventQueue[str] = EventQueue()
    queue.push(3.0, Priority.STEP, "x")
    queue.pop()
    with pytest.raises(ValueError, match="already"):
        queue.push(2.0, Priority.STEP, "y")
