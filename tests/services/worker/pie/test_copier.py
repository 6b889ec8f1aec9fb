"""Transfers by threads, and without overlap: bytes, reports, errors, the end, and their pace."""

import threading

import pytest

from services.worker.pie.copier import InlineCopier, PacedLink, ThreadCopier
from services.worker.pie.core.swap import Direction, Transfer
from shared.clock import monotonic_s
from tests.services.worker.pie.rig import SHAPE, links, make_memory

OUT, IN = Transfer(0, Direction.OUT, 0, 0), Transfer(0, Direction.IN, 1, 0)


class Reports:
    """What a copier said was done."""

    def __init__(self) -> None:
        self.heard: list[tuple[Transfer, int, BaseException | None]] = []
        self._event = threading.Event()

    def on_done(self, transfer: Transfer, sent: int, took_s: float, error: BaseException | None) -> None:
        assert took_s >= 0
        self.heard.append((transfer, sent, error))
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(5.0)
        self._event.clear()


@pytest.mark.parametrize("kind", [ThreadCopier, InlineCopier])
def test_a_layer_goes_out_and_comes_back_elsewhere(kind: type[ThreadCopier] | type[InlineCopier]) -> None:
    memory, reports = make_memory(4, 6), Reports()
    memory.reserve(0)
    copier = kind(memory, links(), monotonic_s)
    copier.start(reports.on_done)
    memory.views(0)[0][:] = 3.0
    used, blocks = ((1, 2), (4, 5)), [1, 4]
    for transfer in (OUT, IN):
        copier.submit(transfer, used)
        reports.wait()
    assert reports.heard == [(OUT, 2 * SHAPE.block_bytes, None), (IN, 2 * SHAPE.block_bytes, None)]
    assert bool((memory.views(1)[0][blocks] == 3.0).all()) and not memory.views(1)[0][0].any()
    assert copier.close(5.0)


def test_a_failed_copy_is_reported_and_the_thread_goes_on() -> None:
    memory, reports = make_memory(4, 6), Reports()
    memory.reserve(0)
    copier = ThreadCopier(memory, links(), monotonic_s)
    copier.start(reports.on_done)
    for used in (((999, 1000),), ((0, 1),)):
        copier.submit(OUT, used)
        reports.wait()
    assert isinstance(reports.heard[0][2], ValueError)
    assert reports.heard[1] == (OUT, SHAPE.block_bytes, None)
    assert copier.close(5.0)


def test_the_end_waits_no_longer_than_it_may() -> None:
    memory, held = make_memory(4, 6), threading.Event()
    memory.reserve(0)

    def sleep(_: float) -> None:
        held.wait(5.0)

    slow = {direction: PacedLink(1.0, monotonic_s, sleep) for direction in Direction}
    copier = ThreadCopier(memory, slow, monotonic_s)
    copier.start(Reports().on_done)
    copier.submit(OUT, ((0, 1),))
    assert not copier.close(0.05)
    held.set()


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def opened() -> tuple[PacedLink, Time]:
    """A link of 1,000 bytes a second, on a clock that sleeping moves."""
    time = Time()
    link = PacedLink(1000.0, time.clock, time.sleep)
    link.open()
    return link, time


def test_copies_take_what_the_link_takes() -> None:
    link, time = opened()
    for _ in range(4):
        link.pace(250)
    assert abs(time.now_s - 101.0) < 1e-9


def test_background_traffic_slows_them_at_once() -> None:
    link, time = opened()
    link.pace(500)
    link.background_bytes_s = 750.0
    link.pace(500)
    assert abs(time.now_s - 102.5) < 1e-9
    link.background_bytes_s = 5000.0
    assert link.rate_bytes_s == 20.0


def test_idle_time_is_not_saved_up_and_no_limit_is_no_wait() -> None:
    time = Time()
    link = PacedLink(1000.0, time.clock, time.sleep)
    time.now_s += 50
    link.open()
    link.pace(1000)
    assert abs(time.now_s - 151.0) < 1e-9
    free = PacedLink(0.0, time.clock, time.sleep)
    free.open()
    free.pace(1 << 40)
    assert abs(time.now_s - 151.0) < 1e-9
