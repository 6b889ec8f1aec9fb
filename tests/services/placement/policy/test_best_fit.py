"""Best fit, and policies by name."""

import pytest

from services.placement import policy
from services.placement.policy.contract import Room
from services.placement.policy.fit import BestFit
from shared.errors import ConfigError

ROOMS = [Room("w2", 100, 200, 1), Room("w1", 50, 200, 9), Room("w0", 50, 200, 0)]


def test_least_room_then_lowest_id() -> None:
    assert BestFit().choose(10, ROOMS) == "w0"


class Elsewhere:
    """What a third party would install."""

    def choose(self, size_tokens: int, rooms: list[Room]) -> str:
        return rooms[-1].worker_id


def test_policies_are_found_by_name_ours_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "elsewhere"

        def load(self) -> type[Elsewhere]:
            return Elsewhere

    monkeypatch.setattr(
        policy, "entry_points", lambda group: [Point()] if group == policy.ENTRY_POINT_GROUP else []
    )
    assert isinstance(policy.create("best_fit"), BestFit)
    assert policy.create("elsewhere").choose(1, ROOMS) == "w0"
    with pytest.raises(
        ConfigError, match="best_fit, elsewhere, load_balance, mell, mell_eager, prefix_aware, worst_fit"
    ):
        policy.create("nonsense")


def test_one_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "broken", "elsewhere:Missing"

        def load(self) -> type[Elsewhere]:
            raise ImportError("no module named elsewhere")

    monkeypatch.setattr(policy, "entry_points", lambda group: [Point()])
    with pytest.raises(ConfigError, match=r"broken.*elsewhere:Missing.*no module"):
        policy.create("broken")
