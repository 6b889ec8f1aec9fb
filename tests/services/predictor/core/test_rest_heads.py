"""Heads on hidden states: they learn, and predict nothing impossible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.core.rest_heads import HEADS, DistributionHead, Head

WIDTH = 12


def drawn(random: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """States one direction of which tells the logarithm of the rest, and rests with noise."""
    states = random.standard_normal((rows, WIDTH)).astype(np.float32)
    rests = np.exp(3.5 + 1.2 * states[:, 0] + 0.5 * random.standard_normal(rows))
    return states, np.maximum(1, rests).astype(np.int64)


def trained(kind: str, steps: int = 800) -> Head:
    random, head = np.random.default_rng(3), HEADS[kind](WIDTH, 0)
    for _ in range(steps):
        states, rests = drawn(random, 96)
        head.learn(states, rests, np.zeros(96, bool))
    return head


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_heads_find_what_tells_the_rest(kind: str) -> None:
    head, (states, rests) = trained(kind), drawn(np.random.default_rng(9), 600)
    told = head.predict(states)
    first, second = np.triu_indices(600, 1)
    agree = np.sign(told[first, 1] - told[second, 1]) * np.sign(rests[first] - rests[second])
    assert agree[rests[first] != rests[second]].mean() > 0.65, "Kendall's tau"
    error = np.abs(told[:, 1] - rests).mean()
    assert error < 0.75 * np.abs(np.median(rests) - rests).mean()


def test_quantiles_of_the_distribution_are_kept() -> None:
    head, (states, rests) = trained("distribution"), drawn(np.random.default_rng(8), 2000)
    told = head.predict(states)
    for column, share in ((1, 0.5), (2, 0.8), (3, 0.9), (4, 0.95)):
        assert (rests <= told[:, column]).mean() == pytest.approx(share, abs=0.08)


def test_answers_that_were_cut_count_as_longer_than_that() -> None:
    """Taken as they are, a cap would be learned as a length."""
    random = np.random.default_rng(2)
    taught, misled = DistributionHead(WIDTH), DistributionHead(WIDTH)
    for _ in range(400):
        states = random.standard_normal((96, WIDTH)).astype(np.float32)
        rests = np.maximum(1, random.exponential(200, 96)).astype(np.int64)
        cut = rests > 100
        taught.learn(states, np.minimum(rests, 100), cut)
        misled.learn(states, np.minimum(rests, 100), np.zeros(96, bool))
    states = random.standard_normal((200, WIDTH)).astype(np.float32)
    assert taught.predict(states)[:, 2].mean() > 2 * misled.predict(states)[:, 2].mean()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(HEADS)),
    values=st.lists(st.floats(-6e4, 6e4, width=32), min_size=WIDTH, max_size=WIDTH),
    rests=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40),
    cut=st.booleans(),
)
def test_whatever_is_learned_predictions_are_finite_and_ascend(
    kind: str, values: list[float], rests: list[int], cut: bool
) -> None:
    head = HEADS[kind](WIDTH, 0)
    states = np.tile(np.array(values, np.float32), (len(rests), 1))
    for _ in range(5):
        head.learn(states, np.array(rests), np.full(len(rests), cut))
    told = head.predict(states[:1])
    assert np.isfinite(told).all()
    assert (told >= 1).all()
    assert (np.diff(told[0, 1:]) >= -1e-6).all()
    again = HEADS[kind](WIDTH, 0)
    again.restore(head.weights())
    assert np.allclose(again.predict(states[:1]), told, rtol=1e-5)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_weights_of_another_head_are_refused(kind: str) -> None:
    head, other = HEADS[kind](WIDTH, 0), HEADS[kind](WIDTH + 1, 0)
    with pytest.raises((ValueError, KeyError)):
        head.restore(other.weights())
    with pytest.raises((ValueError, KeyError)):
        head.restore({})
