"""Kernel costs: newer machines are faster, and prefill is bound by arithmetic."""

import pytest

from sim.costs import find_cost


def test_newer_machines_are_faster() -> None:
    old, new = find_cost("opt-13b-a100"), find_cost("opt-13b-h100")
    for chunks, decodes in (([(0, 1000)], 0), ([], 32), ([(0, 512)], 32)):
        assert new.step_s(chunks, decodes, 200 * decodes) < old.step_s(chunks, decodes, 200 * decodes)


def test_a_long_prompt_costs_its_arithmetic() -> None:
    cost = find_cost("llama2-7b-a100")
    tokens_per_s = 4000 / (cost.step_s([(0, 4000)], 0, 0) - cost.step_s([], 1, 1))
    assert tokens_per_s == pytest.approx(0.6 * 312e12 / (2 * 6.7e9), rel=0.12)
