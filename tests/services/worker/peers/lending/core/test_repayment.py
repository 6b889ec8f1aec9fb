"""Which creditor gets its blocks back first."""

from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.lending.core.repayment import CreditorPressure, in_order, pressures, recalls
from shared.messages.lending import KvTier
from tests.services.ledger.builders import report


def test_the_creditor_under_most_pressure_first() -> None:
    under = {
        "a": CreditorPressure(free_fraction=0.5),
        "b": CreditorPressure(free_fraction=0.1),
        "c": CreditorPressure(3, 0.9),
    }
    found = recalls({"a": 4, "b": 4, "c": 2}, under, free_blocks=9, keep_blocks=2)
    assert found == {"c": 2, "b": 4, "a": 1}


def test_host_memory_before_device_memory_of_those_who_are_not_short() -> None:
    device, host = KvTier.DEVICE, KvTier.HOST
    under = {
        "a": CreditorPressure(2),
        "b": CreditorPressure(free_fraction=0.1),
        "c": CreditorPressure(free_fraction=0.9),
    }
    lenders = [("b", device), ("c", host), ("a", device), ("a", host), ("b", host)]
    assert in_order(lenders, under) == [
        ("a", device),
        ("b", host),
        ("c", host),
        ("a", host),
        ("b", device),
    ]


def test_far_before_near_and_nothing_without_room() -> None:
    under = {"a": CreditorPressure(distance=0), "b": CreditorPressure(distance=1)}
    assert recalls({"a": 4, "b": 4}, under, free_blocks=5, keep_blocks=0) == {"b": 4, "a": 1}
    assert recalls({"a": 4}, {}, free_blocks=2, keep_blocks=2) == {}


def test_pressure_is_what_neighbours_say_of_themselves() -> None:
    neighbours = Neighbours("w0")
    neighbours.hear(report("w0", host="a"), 0.0)
    neighbours.hear(report("w1", host="a", free=5, total=20), 0.0)
    neighbours.hear(report("w2", host="b", free=20, total=20), 0.0)
    assert pressures(neighbours, "a", {"w2": 3, "w3": 1}) == {
        "w1": CreditorPressure(free_fraction=0.25, distance=0),
        "w2": CreditorPressure(short_blocks=3, free_fraction=1.0, distance=1),
        "w3": CreditorPressure(short_blocks=1),
    }
