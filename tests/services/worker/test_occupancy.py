"""Gaps count only while there is something to compute."""

from services.worker.engine_thread import Occupancy


def test_time_between_iterations_counts_while_there_is_more_to_do() -> None:
    occupancy = Occupancy()
    occupancy.on_iteration(1.0, 2.0, is_more_to_do=True)
    occupancy.on_iteration(2.5, 3.0, is_more_to_do=False)
    occupancy.on_iteration(9.0, 10.0, is_more_to_do=True)
    occupancy.on_iteration(10.25, 10.5, is_more_to_do=True)
    assert (occupancy.engine_s, occupancy.between_s) == (2.75, 0.75)
