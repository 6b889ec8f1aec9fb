"""What left before its start is named to placement with the next question, whose books then keep no place.

Keeps a client that leaves while placement's answer is on its way from holding a place on a worker for
seconds: no heartbeat and no step report ever shows its sequence.
"""

from collections.abc import Iterator

import pytest

from services.placement.core.fleet import FleetCapacity
from services.placement.core.packer import Packer
from services.placement.policy import create_packing
from services.placement.policy.fit import WorstFit
from services.scheduler.core.backlog import _MOST_WITHDRAWN, Backlog
from services.scheduler.core.effects import AskPlacement
from services.scheduler.core.rules import Rules
from shared.messages.sequence import SequenceRef
from tests.services.placement.rig import report
from tests.services.scheduler.world import small_world
from tests.shared.messages.builders import ref
from tests.stack.actors import Request
from tests.stack.world import World

WORKERS = ("worker-0", "worker-1")


class Desk:
    """A scheduler's core whose questions to placement are answered by hand."""

    def __init__(self) -> None:
        self.world: World = small_world(workers=2)
        self.world.is_lost = lambda effect: isinstance(effect, AskPlacement)
        self.world.run_for(1.0)

    def questions(self) -> list[AskPlacement]:
        return [effect for effect in self.world.effects if isinstance(effect, AskPlacement)]

    def ask_for(self, name: str) -> Request:
        request = self.world.ask_for(name, prompt_tokens=40, answer_tokens=20, max_tokens=20)
        self.world.run_for(0.02)
        return request

    def leave(self, request: Request) -> None:
        self.world.cancel(request)
        self.world.run_for(0.02)

    def answer(self, *worker_ids: str | None) -> None:
        """The question that is open."""
        self.world.feed("on_placed", self.questions()[-1].question, worker_ids)

    def named(self) -> list[SequenceRef]:
        """By the last question."""
        return list(self.questions()[-1].withdrawn)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.world.core.check_integrity()


def test_one_that_left_while_it_was_asked_for_is_named_once(desk: Desk) -> None:
    desk.leave(desk.ask_for("a"))
    desk.answer("worker-0")
    assert len(desk.questions()) == 1, "nobody else waits"
    desk.ask_for("b")
    assert [item.ref for item in desk.questions()[-1].items] == [ref("b")] and desk.named() == [ref("a")]
    desk.answer(None)
    desk.world.run_for(0.1)
    assert len(desk.questions()) == 3 and desk.named() == []


def test_one_that_left_while_it_waited_on_after_an_answer_is_named(desk: Desk) -> None:
    first = desk.ask_for("a")
    desk.answer(None)
    desk.leave(first)
    desk.ask_for("b")
    assert ref("a") in [named for question in desk.questions() for named in question.withdrawn]


def test_one_that_began_or_was_never_asked_for_is_not_named(desk: Desk) -> None:
    first = desk.ask_for("a")
    second = desk.ask_for("b")
    desk.leave(second)
    desk.answer("worker-0")
    desk.world.until(lambda: len(first.tokens) > 3, limit_s=2.0)
    desk.leave(first)
    desk.ask_for("c")
    assert [named for question in desk.questions() for named in question.withdrawn] == []


def test_a_question_names_so_many_at_most() -> None:
    backlog = Backlog(Rules())
    for number in range(_MOST_WITHDRAWN + 3):
        backlog.withdraw(ref(f"r{number}"))
    withdrawn = backlog.take_withdrawn()
    assert len(withdrawn) == _MOST_WITHDRAWN and withdrawn[0] == ref("r3")
    assert backlog.take_withdrawn() == ()


@pytest.mark.parametrize("policy", ["worst_fit", "mell"])
def test_its_place_is_free_for_the_next_in_the_same_moment(desk: Desk, policy: str) -> None:
    """Two workers with room for one of them each. The clock stands still: nothing expires."""
    fleet = FleetCapacity()
    packer = Packer(lambda capacity: create_packing("mell", capacity)) if policy == "mell" else None
    for name in WORKERS:
        fleet.on_reported(report(name, total=5), 0.0)

    def place() -> tuple[str | None, ...]:
        asked = desk.questions()[-1]
        fleet.on_withdrawn(asked.withdrawn)
        if packer is None:
            return fleet.place(asked.items, frozenset(), WorstFit(), 0.0)
        packer.on_withdrawn(asked.withdrawn)
        return packer.place(asked.items, frozenset(), fleet, 0.0)

    for name in ("a", "b", "c", "d"):
        request = desk.ask_for(name)
        home = place()
        assert home[0] in WORKERS, name
        desk.leave(request)
        desk.answer(*home)
        fleet.check_integrity()
