"""DistServe's fit, by its own formula, and our rule for mixed batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from sim.costs import COSTS, find_cost
from sim.costs.fitted import OPT_13B_A100


def test_the_published_numbers() -> None:
    whole = OPT_13B_A100.step_s([(0, 1000)], 0, 0)
    assert whole == pytest.approx((22.05 + 0.1405 * 1000 + 8.08e-6 * 1e6) / 1e3, rel=1e-3)
    assert OPT_13B_A100.step_s([], 64, 16_000) == pytest.approx(
        (23.48 + 5.93e-4 * 16_000 + 0.0607 * 64) / 1e3, rel=1e-3
    )
    assert OPT_13B_A100.step_s([], 128, 16_000) == pytest.approx(
        (20.21 + 4.91e-4 * 16_000 + 0.120 * 128) / 1e3, rel=1e-3
    )
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


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(ConfigError, match="opt-13b-a100"):
        find_cost("abacus")
