"""Penalties and masked ends against a plain loop, and against transformers' own processors."""

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from services.worker.core.sampling import SamplePoint
from services.worker.engine.sampler import penalize
from shared.messages.sequence import Sampling

VOCABULARY = 11


def reference(logits: list[float], point: SamplePoint) -> list[float]:
    """The contract, one token at a time."""
    sampling = point.sampling
    answer = Counter(point.tokens[len(point.tokens) - point.index :])
    changed = []
    for token, logit in enumerate(logits):
        value = logit
        if token in point.tokens:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        if answer[token]:
            value -= sampling.frequency_penalty * answer[token] + sampling.presence_penalty
        if point.index < sampling.min_tokens and token in sampling.end_token_ids:
            value = -math.inf
        changed.append(value)
    return changed


TEXTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)
PENALTIES = st.sampled_from([0.0, 0.0, 0.3, -1.5, 2.0])


@st.composite
def points(draw: st.DrawFn) -> SamplePoint:
    tokens = draw(TEXTS)
    sampling = Sampling(
        seed=0,
        max_tokens=40,
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3, 2.0])),
        frequency_penalty=draw(PENALTIES),
        presence_penalty=draw(PENALTIES),
        min_tokens=draw(st.integers(0, 20)),
        end_token_ids=tuple(draw(st.lists(st.integers(0, VOCABULARY + 3), max_size=3))),
    )
    return SamplePoint(sampling, 0, draw(st.integers(0, len(tokens))), tokens)


ROWS = st.lists(
    st.tuples(points(), st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200)
@given(ROWS)
def test_logits_are_those_of_the_definition(rows: list[tuple[SamplePoint, list[float]]]) -> None:
    logits = torch.tensor([values for _, values in rows])
    penalize(logits, [point for point, _ in rows])
    expected = torch.tensor([reference(values, point) for point, values in rows])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=100)
@given(ROWS)
def test_a_row_is_the_same_alone_and_among_others(rows: list[tuple[SamplePoint, list[float]]]) -> None:
    together = torch.tensor([values for _, values in rows])
    alone = together.clone()
    penalize(together, [point for point, _ in rows])
    for row, (point, _) in enumerate(rows):
        penalize(alone[row : row + 1], [point])
    assert torch.equal(together, alone)


@settings(max_examples=50)
@given(TEXTS, st.sampled_from([0.6, 1.2, 3.0]), st.integers(0, 2**31))
def test_repetition_is_what_transformers_does(tokens: list[int], penalty: float, seed: int) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    sampling = Sampling(seed=0, max_tokens=9, repetition_penalty=penalty)
    penalize(logits, [SamplePoint(sampling, 0, len(tokens) // 2, tokens)])
    torch.testing.assert_close(logits, expected)


@settings(max_examples=50)
@given(TEXTS, st.integers(0, 20), st.integers(0, 20))
def test_min_tokens_is_what_transformers_does(tokens: list[int], answered: int, min_tokens: int) -> None:
    answered = min(answered, len(tokens) - 1)
    processor = MinNewTokensLengthLogitsProcessor(len(tokens) - answered, min_tokens, [2, 5], device="cpu")
    logits = torch.zeros(1, VOCABULARY)
    expected = processor(torch.tensor([tokens]), logits.clone())
    sampling = Sampling(seed=0, max_tokens=40, min_tokens=min_tokens, end_token_ids=(2, 5))
    penalize(logits, [SamplePoint(sampling, 0, answered, tokens)])
    assert torch.equal(logits, expected)


def test_rows_that_ask_for_nothing_are_not_touched() -> None:
    """The rows share their memory, in which torch refuses to write."""
    logits = torch.zeros(1, VOCABULARY).expand(3, -1)
    penalize(logits, [SamplePoint(Sampling(seed=0, max_tokens=9), 0, 3, [1, 2, 3, 4])] * 3)
    assert torch.equal(logits, torch.zeros(3, VOCABULARY))


def test_what_is_not_finite_stays_so_and_what_is_finite_stays_finite() -> None:
    broken = [math.inf, math.nan, -math.inf, 3.0, -3.0]
    sampling = Sampling(
        seed=0,
        max_tokens=9,
        repetition_penalty=1e-39,
        presence_penalty=2.0,
        min_tokens=9,
        end_token_ids=(0, 1),
    )
    logits = torch.tensor([broken])
    penalize(logits, [SamplePoint(sampling, 0, 5, [0, 1, 2, 3, 4])])
    infinite, unknown, forbidden, large, small = logits[0].tolist()
    assert infinite == math.inf and math.isnan(unknown) and forbidden == -math.inf
    assert 1e38 < large < math.inf and small == -2.0
