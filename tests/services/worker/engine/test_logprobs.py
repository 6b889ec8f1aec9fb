"""Log-probabilities are the log-softmax of the model's own logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.sampler import measure


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 40))
def test_values_are_those_of_the_definition(seed: int, tops: list[int], vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tops), vocabulary, generator=generator) * 5
    tokens = torch.randint(vocabulary, (len(tops),), generator=generator)
    for row, found in enumerate(measure(logits, tokens, tops)):
        values = logits[row].tolist()
        total = math.log(math.fsum(math.exp(value) for value in values))
        order = sorted(range(vocabulary), key=lambda token: -values[token])[: tops[row]]
        assert found.chosen == pytest.approx(values[int(tokens[row])] - total, abs=1e-4)
        assert [token for token, _ in found.top] == order
        expected = torch.log_softmax(logits[row], -1)[order]
        torch.testing.assert_close(torch.tensor([value for _, value in found.top]), expected)


def test_a_chosen_token_among_the_likeliest_has_the_same_value_there() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(2)) * 4
    for found, token in zip(measure(logits, logits.argmax(-1), [3] * 40), logits.argmax(-1), strict=True):
        assert found.top[0] == (int(token), found.chosen)
