"""Tokens drawn in C++ are those of the definition, for any spread and any size of the vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.drawing import NativeDraw, arrivals, draw_natively
from services.worker.engine.native.library import load


def draw(logits: torch.Tensor, wishes: list[NativeDraw]) -> list[int]:
    return draw_natively(load(), logits, logits.max(-1).values, wishes)


def definition(logits: torch.Tensor, wish: NativeDraw) -> tuple[set[int], int]:
    """Which tokens may be drawn, and which is. In double and in order."""
    weights = ((logits.double() - logits.max()) / wish.temperature).exp()
    weights[weights < wish.min_p] = 0
    order = weights.sort(descending=True, stable=True)
    if wish.top_k:
        order.values[wish.top_k :] = 0
    before = order.values.cumsum(0) - order.values
    kept = order.values > 0
    if wish.top_p < 1:
        kept &= before < wish.top_p * order.values.sum()
        kept[0] = True
    least = order.values[kept].min()
    weights[weights < least] = 0
    (times,) = arrivals([wish.key], len(weights), torch.device("cpu"))
    return set(weights.nonzero().flatten().tolist()), int((times / weights).argmin())


wishes = st.builds(
    NativeDraw,
    st.integers(0, 3),
    st.sampled_from([0.2, 0.7, 1.0, 1.9]),
    st.sampled_from([0.0, 0.0, 0.0123, 0.1789, 1.0]),
    st.sampled_from([0.05, 0.31, 0.93, 0.999, 1.0]),
    st.sampled_from([0, 0, 1, 3, 40, 200, 100_000]),
    st.integers(0, 2**64 - 1),
)


@settings(max_examples=150)
@given(st.integers(0, 2**31), st.integers(1, 700), st.sampled_from([0.01, 1.0, 4.0]), wishes)
def test_tokens_are_those_of_the_definition(
    seed: int, vocabulary: int, spread: float, wish: NativeDraw
) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    (token,) = draw(logits, [wish])
    allowed, expected = definition(logits[wish.row], wish)
    # Within rounding of the border, what is kept may be one more or less, of which any may be the first.
    answers = {expected}
    for top_p in (wish.top_p * (1 - 1e-5), min(wish.top_p * (1 + 1e-5), 1.0)):
        near = NativeDraw(wish.row, wish.temperature, wish.min_p, top_p, wish.top_k, wish.key)
        answers.add(definition(logits[wish.row], near)[1])
    assert token in answers
    assert token in allowed or wish.top_p < 1 or wish.min_p > 0


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 5000])
def test_a_flat_nucleus_of_a_large_vocabulary(top_p: float, top_k: int) -> None:
    logits = torch.randn(1, 50_001, generator=torch.Generator().manual_seed(4)) * 0.1
    for key in range(12):
        wish = NativeDraw(0, 1.0, 0.0, top_p, top_k, key << 32 | key)
        (token,) = draw(logits, [wish])
        allowed, expected = definition(logits[0], wish)
        assert token == expected and token in allowed
