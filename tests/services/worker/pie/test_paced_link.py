"""Pacing, on a clock that sleeping moves."""

from services.worker.pie.paced_link import PacedLink


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_copies_take_what_the_link_takes() -> None:
    time = Time()
    link = PacedLink(1000.0, time.clock, time.sleep)
    link.open()
    for _ in range(4):
        link.pace(250)
    assert abs(time.now_s - 101.0) < 1e-9


def test_background_traffic_slows_them_at_once() -> None:
    time = Time()
    link = PacedLink(1000.0, time.clock, time.sleep)
    link.open()
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
