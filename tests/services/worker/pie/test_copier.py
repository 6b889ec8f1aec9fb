"""What of a layer travels, that it arrives, and at which pace."""

import threading

import pytest
import torch

from services.worker.pie import memory as module
from services.worker.pie.copier import InlineCopier, PacedLink, ThreadCopier
from services.worker.pie.core.copies import set_of
from services.worker.pie.core.swap import Direction, Transfer
from shared.clock import monotonic_s
from tests.services.worker.pie.rig import SHAPE, ignore, links, make_memory, runs

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


def test_only_used_blocks_travel() -> None:
    memory = make_memory(4, 6)
    keys, values = memory.views(1)
    keys.copy_(torch.randn_like(keys))
    values.copy_(torch.randn_like(values))
    wanted = keys.clone(), values.clone()
    used = [0, 2, 5]
    parts: list[int] = []
    assert memory.reserve(0) and not memory.reserve(0)
    assert memory.copy_out(1, 0, runs(*used), parts.append) == 3 * SHAPE.block_bytes == sum(parts)
    assert SHAPE.block_bytes == 4 * 2 * (3 + 5) * 4
    assert memory.copy_in(3, 0, runs(*used), ignore) == 3 * SHAPE.block_bytes
    for found, expected in zip(memory.views(3), wanted, strict=True):
        assert torch.equal(found[used], expected[used])
        assert not found[1].any()


def test_small_holes_travel_along_and_what_the_slot_has_not_is_refused() -> None:
    memory = make_memory(4, 6)
    assert memory.runs_in(set_of([0, 2, 5]), set_of(range(6))) == ((0, 6),)
    assert memory.runs_in(set_of([0, 2, 5]), set_of([0, 1, 2, 5])) == ((0, 3), (5, 6))
    assert memory.runs_out(set_of([0, 2, 5])) == ((0, 1), (2, 3), (5, 6))
    memory.reserve(0)
    with pytest.raises(ValueError, match="block 6 of a slot of 6"):
        memory.copy_out(1, 0, ((0, 7),), ignore)


def test_blocks_beyond_a_shrunk_slot_are_left_out() -> None:
    memory = make_memory(4, 6, fifo_layers=3)
    assert memory.runs_in(set_of([1, 7]), set_of([1, 7])) == ((1, 2), (7, 8))
    memory.shift(memory.partition.resize(4), frozenset({1, 2}))
    assert memory.runs_in(set_of([1, 7]), set_of([1, 7])) == ((1, 2),)


def test_long_runs_and_scattered_blocks_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOLE_BYTES", 3 * SHAPE.block_bytes)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2 * SHAPE.block_bytes)
    memory = make_memory(4, 12)
    for pool in memory.views(1):
        pool.copy_(torch.randn_like(pool))
    used, parts = [0, 2, 3, 5, 6, 7, 8, 9, 11], list[int]()
    memory.reserve(2)
    assert memory.copy_out(1, 2, runs(*used), parts.append) == 9 * SHAPE.block_bytes == sum(parts)
    assert max(parts) == 2 * SHAPE.block_bytes and len(parts) == 5
    memory.copy_in(3, 2, runs(*used), ignore)
    for found, expected in zip(memory.views(3), memory.views(1), strict=True):
        assert torch.equal(found[used], expected[used]) and not found[[1, 4, 10]].any()


def test_moved_blocks_keep_their_contents_on_the_device_and_on_the_host() -> None:
    memory = make_memory(4, 6)
    keys, values = memory.views(2)
    keys.copy_(torch.randn_like(keys))
    values.copy_(torch.randn_like(values))
    memory.reserve(0)
    memory.copy_out(2, 0, runs(0, 1, 4, 5), ignore)
    memory.rename_blocks(0, {4: 1, 5: 3})  # What lay on 1 was given back meanwhile.
    memory.rename_blocks(7, {})
    wanted = [keys[[0, 4, 5]].clone(), values[[0, 4, 5]].clone()]
    memory.move_blocks(2, {4: 1, 5: 3})
    assert memory.copy_in(0, 0, runs(0, 1, 3), ignore) == 3 * SHAPE.block_bytes
    assert memory.copy_in(0, 5, runs(0, 1, 3), ignore) == 0
    for slot in (0, 2):
        for found, expected in zip(memory.views(slot), wanted, strict=True):
            assert torch.equal(found[[0, 1, 3]], expected)
