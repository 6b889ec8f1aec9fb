"""Which workers a packer counts with."""

from services.placement.core.fleet import FleetCapacity
from services.placement.core.packer import WorkerRoster
from tests.shared.messages.builders import worker_report


def fleet(*names: str, incarnation: int = 1) -> FleetCapacity:
    made = FleetCapacity(silence_s=2.0, reservation_s=5.0)
    for name in names:
        made.on_reported(worker_report(name, incarnation=incarnation), 0.0)
    return made


def test_a_retired_life_is_not_heard_and_the_next_one_is() -> None:
    roll = WorkerRoster()
    assert roll.heard(fleet("a", "b")) == {"a": 1, "b": 1}
    roll.retire("a", fleet("a", "b"))
    assert roll.heard(fleet("a", "b")) == {"b": 1}
    assert roll.state_of("a", has_residents=False) == "retired"
    assert roll.heard(fleet("a", incarnation=2)) == {"a": 2}
    roll.unretire("a")
    assert roll.heard(fleet("a")) == {"a": 1}


def test_the_emptiest_come_first() -> None:
    roll = WorkerRoster()
    roll.present = {"a": 1, "b": 1, "c": 1}
    assert roll.emptiest([("a", 5), ("b", 2), ("a", 4), ("gone", 9)], 8) == ["c", "b"]
    assert roll.state_of("a", has_residents=True) == "draining"
    assert roll.state_of("x", has_residents=False) == "unknown"
