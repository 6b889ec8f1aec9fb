"""Transfers by threads, and without overlap: bytes, reports, errors, the end."""

import threading
import time

import pytest

from services.worker.pie.copier import InlineCopier, ThreadCopier
from services.worker.pie.core.swap import Direction, Transfer
from services.worker.pie.paced_link import PacedLink
from shared.clock import monotonic_s
from tests.services.worker.pie.test_memory import SHAPE, make_memory

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
    links = {direction: PacedLink(0.0, monotonic_s, time.sleep) for direction in Direction}
    copier = kind(memory, links, monotonic_s)
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
    links = {direction: PacedLink(0.0, monotonic_s, time.sleep) for direction in Direction}
    copier = ThreadCopier(memory, links, monotonic_s)
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

    links = {direction: PacedLink(1.0, monotonic_s, sleep) for direction in Direction}
    copier = ThreadCopier(memory, links, monotonic_s)
    copier.start(Reports().on_done)
    copier.submit(OUT, ((0, 1),))
    assert not copier.close(0.05)
    held.set()
