"""A batching policy that raises: requests go on, or fail at once with its name. On virtual time."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from services.scheduler.core.effects import Effect as SchedulerEffect
from services.scheduler.core.effects import SequenceLeft
from services.scheduler.core.sequence import Phase
from services.scheduler.policy.contract import BY_ARRIVAL, PolicyFactory
from services.scheduler.policy.first_come import VllmPolicy
from shared.errors import PolicyFailed
from shared.messages.sequence import FinishReason
from tests.stack.actors import Wanted
from tests.stack.world import EVEN, World

REQUESTS = 8
ABOUT_ONE = ("on_arrival", "queue_key")
"""Their sequence is new: it alone is refused."""
EVENTS = ("on_ended", "on_predicted", "on_short", "on_measured", "plan", *ABOUT_ONE)


class TellingWorld(World):
    """The gateway hears which sequences were given up."""

    def _carry_out_plan(self, effect: SchedulerEffect) -> None:
        super()._carry_out_plan(effect)
        match effect:
            case SequenceLeft(ref, Phase.DROPPED, FinishReason.ERROR):
                self.send(self.scheduler.name, self.gateway, lambda: self.gateway.on_given_up(ref))


class Fallible(VllmPolicy):
    """`vllm`, with a key for the queue."""

    def queue_key(self, task: Any, work_s: float) -> float:
        return float(BY_ARRIVAL.place(task, work_s)[0])


def raising(methods: str, calls: range | float) -> PolicyFactory:
    """These methods raise in these calls, of whichever object; from that one on where it is a number."""
    numbers = count()

    def fallible(method: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            number = next(numbers)
            if number in calls if isinstance(calls, range) else number >= calls:
                raise ValueError("my own mistake")
            return getattr(super(made, self), method)(*arguments)

        return call

    made: Any = type("Mine", (Fallible,), {method: fallible(method) for method in methods.split()})
    factory: PolicyFactory = made
    return factory


def served(method: str, calls: range | float, *, within_s: float = 20.0) -> World:
    """All requests ended; a quarter of them began while the others ran."""
    wanted = [Wanted(20 + number, 180 + number, 250) for number in range(REQUESTS)]
    world = TellingWorld(wanted=wanted, workers=2, kv_blocks=256, policy=raising(method, calls), pace=EVEN)
    world.is_checked = False  # the check says that a policy raised
    for number in range(REQUESTS):
        world.after(1.0 + 0.05 * number, partial(world.submit, (f"r{number}", 0)))
    world.until(lambda: world.is_over, limit_s=within_s)
    return world


@pytest.mark.parametrize("method", EVENTS)
def test_what_a_policy_raises_once_costs_no_other_request(method: str) -> None:
    world = served(method, range(2, 3))
    refused = [one for one in world.requests if one.refused is not None]
    for one in refused:
        assert isinstance(one.refused, PolicyFailed)
        assert (
            "batching policy Mine raised ValueError: my own mistake (test_policy_failures_cores.py:"
            in str(one.refused)
        )
    assert len(refused) == (1 if method in ABOUT_ONE else 0)
    answered = [one for one in world.requests if one.refused is None]
    assert all(one.tokens == one.expected for one in answered)


@pytest.mark.parametrize("method", [*EVENTS, "__init__", "plan on_adopted"])
def test_a_policy_that_raises_always_leaves_nobody_waiting(method: str) -> None:
    """Each request has its answer, or an error with the policy's name within a second; and the worker is
    not asked for snapshots all the time."""
    world = served(method, 1 if method == "__init__" else 2)
    for one in world.requests:
        assert one.tokens == one.expected if one.refused is None else "Mine" in str(one.refused)
    before = len(world.lines("AskSnapshot"))
    world.run_until(lambda: False, limit_s=5.0)
    assert len(world.lines("AskSnapshot")) - before <= 12
    if method not in ("on_ended", "on_predicted", "on_short"):
        late, began_s = world.ask_for("late", 20, 10, 40), world.now_s
        world.until(lambda: late.over, limit_s=1.0)
        assert isinstance(late.refused, PolicyFailed) and world.now_s - began_s < 1.0
    assert "Mine" in world.core.describe()["trouble"]
