"""Each ticket has one answer, the urgent go first, what nobody waits for gives way to a step that reads."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.transfers import Route, Ticket, TransferEngine
from shared.errors import DeadlineExceeded, Overloaded
from tests.patience import PATIENCE_S

POLITE = (Route.STORE, Route.WRITE)


class Rig:
    """An engine whose urgent thread is busy until it is told otherwise."""

    def __init__(self, **settings: Any) -> None:
        self.woken = threading.Semaphore(0)
        self.engine = TransferEngine(self.woken.release, **settings)
        self.is_free = threading.Event()
        self.began: list[str] = []

    def block(self, route: Route) -> Ticket[bool]:
        begun = threading.Event()

        def copy() -> bool:
            begun.set()
            return self.is_free.wait(PATIENCE_S)

        ticket = self.engine.start(route, copy, failed=False)
        assert ticket is not None and begun.wait(PATIENCE_S)
        return ticket

    def start(self, route: Route, name: str = "", **given: Any) -> Ticket[str] | None:
        def copy() -> str:
            self.began.append(name)
            return name

        return self.engine.start(route, copy, "failed", **given)


@contextmanager
def rig(**settings: Any) -> Iterator[Rig]:
    made = Rig(**settings)
    yield made
    made.is_free.set()
    assert made.engine.halt(PATIENCE_S)


def test_the_most_urgent_goes_first_and_equal_ones_in_order() -> None:
    with rig() as at:
        at.block(Route.LOAD)
        wanted = {"r1": Route.READ, "g1": Route.GIVE, "p": Route.PULL, "g2": Route.GIVE, "l": Route.LOAD}
        tickets = [at.start(route, name) for name, route in wanted.items()]
        at.is_free.set()
        for ticket in tickets:
            assert ticket is not None and ticket.wait(PATIENCE_S)
        assert at.began == ["l", "p", "g1", "g2", "r1"]


@pytest.mark.parametrize("route", [Route.READ, *POLITE])
def test_what_nobody_waits_for_gives_way_to_a_step_that_reads(route: Route) -> None:
    reading = threading.Event()
    reading.set()
    with rig(is_reading=reading.is_set) as at:
        ahead = at.start(route, "ahead")
        assert ahead is not None
        load = at.start(Route.LOAD, "load")
        assert load is not None and load.wait(PATIENCE_S)
        assert ahead.wait(PATIENCE_S), "not for ever"
        assert at.began[0] == "load" and "ahead" in at.began
        assert ahead.held_until_s > 0 == load.held_until_s
        reading.clear()
        later = at.start(route, "later")
        assert later is not None and later.wait(PATIENCE_S)
        assert later.held_until_s == 0


def test_an_ended_ticket_is_freed_without_a_collection() -> None:
    """Those of a worker waited for a full one, which is rare: tens of MB."""
    answers: list[str] = []
    with rig() as at:
        ticket = at.start(Route.STORE, "s", on_ended=answers.append)
        assert ticket is not None and ticket.wait(PATIENCE_S) and at.woken.acquire(timeout=PATIENCE_S)
        at.engine.settle()
        seen = weakref.ref(ticket)
        gc.disable()
        try:
            del ticket
            assert at.engine.run(Route.WRITE, lambda: "", "", size_bytes=0, within_s=PATIENCE_S) == ""
            assert seen() is None and answers == ["s"]
        finally:
            gc.enable()


def test_more_than_may_be_open_are_refused_and_none_after_the_end() -> None:
    with rig(most_open=2) as at:
        first = at.block(Route.LOAD)
        assert at.start(Route.LOAD, "second") is not None
        assert at.start(Route.LOAD, "third") is None
        assert at.start(Route.READ, "of another route") is not None
        with pytest.raises(Overloaded):
            at.engine.run(Route.LOAD, lambda: 1, 0, size_bytes=0, within_s=1.0)
        at.is_free.set()
        assert first.wait(PATIENCE_S)
    assert at.start(Route.LOAD, "after") is None


def test_who_waits_for_a_turn_that_does_not_come_knows_that_nothing_was_copied() -> None:
    with rig() as at:
        at.block(Route.LOAD)
        with pytest.raises(DeadlineExceeded):
            at.engine.run(Route.GIVE, lambda: at.began.append("late"), None, size_bytes=0, within_s=0.05)
        at.is_free.set()
        assert at.engine.run(Route.GIVE, lambda: 7, 0, size_bytes=3, within_s=PATIENCE_S) == 7
    assert at.began == []
    assert at.engine.figures[Route.GIVE].lost == 1
    assert (at.engine.figures[Route.GIVE].copies, at.engine.figures[Route.GIVE].size_bytes) == (1, 3)


def test_a_copy_that_fails_is_answered_and_the_next_goes_on() -> None:
    def fail() -> str:
        raise OSError("no such place")

    with rig() as at:
        assert at.engine.run(Route.LOAD, fail, "failed", size_bytes=1, within_s=PATIENCE_S) == "failed"
        assert at.engine.run(Route.LOAD, lambda: "good", "", size_bytes=1, within_s=PATIENCE_S) == "good"


ACTION = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(Route)),
    st.tuples(st.sampled_from(["give up", "finish"]), st.integers(0, 30)),
    st.tuples(st.sampled_from(["settle", "read", "pause"]), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTION, max_size=40), st.booleans())
def test_every_ticket_is_answered_once_whatever_becomes_of_it(
    actions: list[tuple[str, Any]], is_settled: bool
) -> None:
    """`copied`: a number is in it at most once, and exactly where its answer says so."""
    reading = threading.Event()
    engine = TransferEngine(lambda: None, most_open=8, is_reading=reading.is_set)
    copied: list[int] = []
    answers: list[tuple[int, bool]] = []
    tickets: list[Ticket[bool]] = []
    for what, which in actions:
        if what == "start":
            number = len(tickets)

            def copy(number: int = number) -> bool:
                copied.append(number)
                return True

            def on_ended(answer: bool, number: int = number) -> None:
                answers.append((number, answer))

            ticket = engine.start(which, copy, failed=False, on_ended=on_ended)
            tickets += [] if ticket is None else [ticket]
        elif what == "give up" and which < len(tickets):
            if tickets[which].give_up():
                assert which not in copied or tickets[which].is_done
        elif what == "finish" and which < len(tickets):
            engine.finish(tickets[which])
            assert tickets[which].wait(0.0)
        elif what == "settle":
            engine.settle()
        elif what == "read":
            (reading.clear if reading.is_set() else reading.set)()
    if is_settled:
        for ticket in tickets:
            assert ticket.wait(PATIENCE_S)
    assert engine.halt(PATIENCE_S)
    engine.settle()
    assert sorted(number for number, _ in answers) == list(range(len(tickets)))
    assert sorted(copied) == sorted(number for number, answer in answers if answer)
    assert all(each.open == 0 for each in engine.figures.values())
    total = sum(each.copies + each.lost for each in engine.figures.values())
    assert total == len(tickets)
