"""Sweeps: order kept, every result told, errors with their argument."""

import pytest

from sim.sweep import cores, sweep


def square(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return number * number


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order_and_told(processes: int) -> None:
    told: list[tuple[int, int]] = []
    results = sweep(square, [3, 1, 2], processes=processes, on_result=lambda a, r: told.append((a, r)))
    assert results == [9, 1, 4]
    assert sorted(told) == [(1, 1), (2, 4), (3, 9)]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_names_its_argument(processes: int) -> None:
    with pytest.raises(ValueError, match="negative") as caught:
        sweep(square, [1, -5], processes=processes)
    assert any("-5" in note for note in caught.value.__notes__)


def test_there_is_a_core() -> None:
    assert cores() >= 1
