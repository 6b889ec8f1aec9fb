"""A heartbeat goes on through a long iteration, and stops for good with a dead engine."""

from concurrent.futures import Future

import pytest

from services.worker.egress import Heartbeat
from shared.errors import InternalError
from shared.messages.reports import WorkerReported
from tests.shared.messages.builders import worker_report


def report(stepped_seq: int = 0) -> WorkerReported:
    return worker_report(seq=0, stepped_seq=stepped_seq)


class Engine:
    """Answers questions when told to."""

    def __init__(self) -> None:
        self.asked: list[Future[WorkerReported]] = []

    def ask(self) -> "Future[WorkerReported]":
        self.asked.append(Future())
        return self.asked[-1]


async def test_the_last_report_stands_in_while_the_engine_is_busy() -> None:
    engine = Engine()
    heartbeat = Heartbeat(engine.ask, interval_s=0.02, stall_timeout_s=9.0)
    assert await heartbeat.next() is None
    engine.asked[0].set_result(report(stepped_seq=5))
    first = await heartbeat.next()
    second = await heartbeat.next()
    assert first is not None and second is not None
    assert (first.seq, second.seq) == (1, 2) and first.stepped_seq == second.stepped_seq == 5
    assert len(engine.asked) == 2


async def test_sections_are_asked_for_each_time_and_the_engines_own_word_stays() -> None:
    """A report that stands in while the engine is busy says what is lent now, not what was."""
    engine, hosts = Engine(), iter("abc")
    heartbeat = Heartbeat(engine.ask, lambda _: {"host": next(hosts)}, interval_s=0.02, stall_timeout_s=9.0)
    sent = [heartbeat.number(report(stepped_seq=8)), await heartbeat.next(), await heartbeat.next()]
    assert [(r.seq, r.stepped_seq, r.host) for r in sent if r is not None] == [
        (1, 8, "a"),
        (2, 8, "b"),
        (3, 8, "c"),
    ]


async def test_an_engine_that_stays_silent_is_given_up() -> None:
    heartbeat = Heartbeat(Engine().ask, interval_s=0.02, stall_timeout_s=0.05)
    assert await heartbeat.next() is None and await heartbeat.next() is None
    with pytest.raises(InternalError, match="answered nothing"):
        await heartbeat.next()
