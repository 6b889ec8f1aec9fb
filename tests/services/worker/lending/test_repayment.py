"""Which creditor gets its blocks back first."""

from services.worker.lending.repayment import Pressure, recalls


def test_the_creditor_under_most_pressure_first() -> None:
    pressures = {"a": Pressure(free_fraction=0.5), "b": Pressure(free_fraction=0.1), "c": Pressure(3, 0.9)}
    found = recalls({"a": 4, "b": 4, "c": 2}, pressures, free_blocks=9, keep_blocks=2)
    assert found == {"c": 2, "b": 4, "a": 1}


def test_far_before_near_and_nothing_without_room() -> None:
    pressures = {"a": Pressure(distance=0), "b": Pressure(distance=1)}
    assert recalls({"a": 4, "b": 4}, pressures, free_blocks=5, keep_blocks=0) == {"b": 4, "a": 1}
    assert recalls({"a": 4}, {}, free_blocks=2, keep_blocks=2) == {}
