"""Worst fit."""

from services.placement.policy.contract import Room
from services.placement.policy.fit import WorstFit


def test_most_room_then_fewest_sequences_then_lowest_id() -> None:
    rooms = [
        Room("w0", 50, 200, 0),
        Room("w3", 100, 200, 2),
        Room("w2", 100, 200, 1),
        Room("w1", 100, 200, 2),
    ]
    assert WorstFit().choose(10, rooms) == "w2"
    assert WorstFit().choose(10, [rooms[1], rooms[3]]) == "w1"
