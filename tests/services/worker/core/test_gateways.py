"""A gateway is lost when it was silent while this worker listened."""

from services.worker.core.tombstones import GatewayWatch


def ticks(watch: GatewayWatch, start_s: float, end_s: float, every_s: float = 0.5) -> list[str]:
    lost: list[str] = []
    now_s = start_s
    while now_s <= end_s:
        lost += watch.tick(now_s)
        now_s += every_s
    return lost


def test_a_silent_gateway_is_named_once() -> None:
    watch = GatewayWatch(timeout_s=10.0)
    watch.tick(0.0)
    assert watch.hear("gateway-0", 1)
    assert ticks(watch, 0.5, 10.0) == []
    assert ticks(watch, 10.5, 30.0) == ["gateway-0"]


def test_one_that_is_heard_stays() -> None:
    watch = GatewayWatch(timeout_s=10.0)
    watch.hear("gateway-0", 1)
    for start_s in range(0, 60, 6):
        assert ticks(watch, start_s, start_s + 5.5) == []
        watch.hear("gateway-0", 1)


def test_time_in_which_the_worker_itself_was_stopped_does_not_count() -> None:
    watch = GatewayWatch(timeout_s=10.0)
    watch.hear("gateway-0", 1)
    assert ticks(watch, 0.0, 5.0) == []
    assert ticks(watch, 100.0, 103.0) == []
    assert ticks(watch, 103.5, 120.0) == ["gateway-0"]


def test_an_earlier_incarnation_is_not_heard_any_more() -> None:
    watch = GatewayWatch(timeout_s=10.0)
    assert watch.hear("gateway-0", 5) and watch.hear("gateway-0", 6)
    assert not watch.hear("gateway-0", 5)
