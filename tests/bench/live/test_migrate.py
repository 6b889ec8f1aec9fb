"""What `bench migrate` makes of frames and outcomes: pauses between workers, refusals, figures by mode."""

from typing import Any

import pytest

from bench.live.migrate.mover import Mover, Watch
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMoved
from shared.messages.tokens import TokenDelta, TokenFrame
from tests.services.placement.rig import listed, report

KEY = ("req_1", 0)


def frame(attempt: int, first: int, count: int = 1) -> TokenFrame:
    return TokenFrame("w", 1, (TokenDelta(*KEY, attempt, first, tuple(range(count))),))


def watched(monkeypatch: pytest.MonkeyPatch, *seen: tuple[float, int, int]) -> Watch:
    """(time, attempt, index) of tokens."""
    times = iter([at_s for at_s, _, _ in seen])
    monkeypatch.setattr("bench.live.migrate.mover.time.perf_counter", lambda: next(times))
    watch = Watch()
    for _, attempt, first in seen:
        watch.on_frame(frame(attempt, first))
    return watch


def test_a_pause_ends_with_the_first_of_the_next_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ((0.0, 1, 0), (0.1, 1, 1), (0.2, 1, 2), (0.5, 2, 3), (0.6, 2, 4))
    watch = watched(monkeypatch, *seen)
    found = watch.pause(KEY, 1)
    assert found is not None and found.pause_s == pytest.approx(0.3)
    assert found.step_s == pytest.approx(0.1)
    assert watch.pause(KEY, 2) is None and watch.pause(("other", 0), 1) is None


class FakeBus:
    """Takes every order but the first."""

    def __init__(self) -> None:
        self.orders: list[MoveSequences] = []

    async def request(self, subject: str, order: MoveSequences, reply: object, **_: Any) -> MovesTaken:
        self.orders.append(order)
        return MovesTaken(refusals=("busy" if len(self.orders) == 1 else "",))


async def test_the_mover_moves_what_runs_to_the_next_worker_once_at_a_time() -> None:
    bus: Any = FakeBus()
    mover = Mover(bus, "tokens")
    mover.on_reported(report("w0", sequences=(listed("a"), listed("b"))))
    mover.on_reported(report("w1"))
    assert not mover.running(), "nothing was generated yet"
    assert await mover.move_one(least_generated=0)
    assert mover.refusals == ["busy"] and mover.under_way == 1
    target = bus.orders[-1].moves[0]
    assert (target.ref.request_id, target.target) == ("b", "w1")
    assert [listed.ref.request_id for _, listed in mover.running(least_generated=0)] == ["a"]
    mover.on_moved(SequenceMoved(ref=target.ref, source="w0", target="w1"))
    mover.on_moved(SequenceMoved(ref=target.ref, source="w0", target="w1", reason="late"))
    assert mover.under_way == 0 and len(mover.done) == 1
    await mover.until_over(2, within_s=1)
