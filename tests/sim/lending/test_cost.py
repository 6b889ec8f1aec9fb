"""Remote attention costs a round trip per layer and overlaps with local attention."""

import pytest

from sim.lending.cost import LAYERS, LendingCost

COST = LendingCost()


def test_remote_context_costs_the_network_and_no_more_while_it_is_the_smaller_part() -> None:
    whole = COST.step_s(10, 20_000, [])
    assert COST.step_s(10, 20_000, [20_000]) - whole == pytest.approx(LAYERS * COST.round_trip_s)
    assert COST.step_s(10, 20_000, [5_000, 30_000]) > COST.step_s(10, 20_000, [5_000])
    assert COST.serving_s(1000) == pytest.approx(1000 * COST.context_token_s)


def test_copies_go_at_the_links_speed() -> None:
    assert COST.copy_s(25_000) == pytest.approx(25_000 * 819_200 / 20e9)
