"""Where requests go."""

import pytest

from services.placement.policy.contract import Room
from shared.errors import ConfigError
from sim.routers import find_router
from tests.sim.simple import request


def rooms(*free_tokens: int) -> list[Room]:
    return [Room(str(i), free, 100, i) for i, free in enumerate(free_tokens)]


def test_each_by_its_rule() -> None:
    one = request(prompt=20)
    robin = find_router("round_robin")
    assert [robin.choose(one, rooms(9, 9)) for _ in range(3)] == [0, 1, 0]
    assert find_router("least_work").choose(one, rooms(5, 90)) == 0
    assert find_router("best_fit").choose(one, rooms(10, 90, 30)) == 2
    assert find_router("worst_fit").choose(one, rooms(10, 90, 30)) == 1


def test_where_none_has_room_the_least_overcommitted_takes_it() -> None:
    assert find_router("best_fit").choose(request(prompt=20), rooms(-50, -10, -30)) == 1


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(ConfigError):
        find_router("astrology")
