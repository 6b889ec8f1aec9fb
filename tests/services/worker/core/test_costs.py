"""DistServe's fit, by its own formula, and our rule for mixed batches.

Kernel costs: newer machines are faster, and prefill is bound by arithmetic. The fit to live steps recovers
what made them, and slopes are never negative."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.costs import COSTS, find_cost
from services.worker.core.costs.fitted import OPT_13B_A100
from sim.linear_cost import MeasuredStep, fit_linear


def test_the_published_numbers() -> None:
    whole = OPT_13B_A100.step_s([(0, 1000)], 0, 0)
    assert whole == pytest.approx((22.05 + 0.1405 * 1000 + 8.08e-6 * 1e6) / 1e3, rel=1e-3)
    for rows, fixed, token, row in ((64, 23.48, 5.93e-4, 0.0607), (128, 20.21, 4.91e-4, 0.120)):
        published = (fixed + token * 16_000 + row * rows) / 1e3
        assert OPT_13B_A100.step_s([], rows, 16_000) == pytest.approx(published, rel=1e-3)
    assert OPT_13B_A100.step_s([], 0, 0) == 0.0


@given(
    name=st.sampled_from(sorted(COSTS)),
    tokens=st.integers(1, 2048),
    cut=st.integers(1, 2047),
    decodes=st.integers(1, 200),
)
def test_chunks_add_up_and_mixing_saves_the_fixed_part(
    name: str, tokens: int, cut: int, decodes: int
) -> None:
    cost, cut = find_cost(name), min(cut, tokens)
    whole, first, second = (cost.step_s([chunk], 0, 0) for chunk in ((0, tokens), (0, cut), (cut, tokens)))
    assert first + second >= whole - 1e-12
    apart = whole + cost.step_s([], decodes, 100 * decodes)
    assert whole < cost.step_s([(0, tokens)], decodes, 100 * decodes) < apart


def test_newer_machines_are_faster() -> None:
    old, new = find_cost("opt-13b-a100"), find_cost("opt-13b-h100")
    for chunks, decodes in (([(0, 1000)], 0), ([], 32), ([(0, 512)], 32)):
        assert new.step_s(chunks, decodes, 200 * decodes) < old.step_s(chunks, decodes, 200 * decodes)


def test_a_long_prompt_costs_its_arithmetic() -> None:
    cost = find_cost("llama2-7b-a100")
    tokens_per_s = 4000 / (cost.step_s([(0, 4000)], 0, 0) - cost.step_s([], 1, 1))
    assert tokens_per_s == pytest.approx(0.6 * 312e12 / (2 * 6.7e9), rel=0.12)


def steps(fixed_s: float, prefill_s: float, decode_s: float) -> list[MeasuredStep]:
    sizes = product((0, 16, 100, 300), range(1, 9))
    return [MeasuredStep(p, d, fixed_s + prefill_s * p + decode_s * d) for p, d in sizes]


@given(fixed=st.floats(1e-3, 1e-1), prefill=st.floats(0, 1e-3), decode=st.floats(0, 1e-2))
def test_the_parts_are_recovered(fixed: float, prefill: float, decode: float) -> None:
    cost = fit_linear(steps(fixed, prefill, decode), name="x", overhead_s=0.5)
    assert cost.fixed_s == pytest.approx(fixed + 0.5, rel=1e-6)
    assert cost.step_s([(0, 50)], 4, 0) == pytest.approx(0.5 + fixed + 50 * prefill + 4 * decode, rel=1e-6)
