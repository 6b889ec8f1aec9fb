"""Penalties, biases, masked and forced tokens against a plain loop, and against transformers' processors."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from services.worker.core.sampling import SamplePoint
from services.worker.engine.sampler import Logits, are_likeliest, penalize, sample
from shared.messages.sequence import Sampling, pack_tokens

VOCABULARY = 11


def reference(logits: list[float], point: SamplePoint) -> list[float]:
    """The contract, one token at a time."""
    how, text = point.sampling, list(point.tokens[len(point.tokens) - point.index :])
    answer, biases, changed = Counter(text), dict(how.logit_bias), []
    for token, logit in enumerate(logits):
        value = logit + biases.get(token, 0.0)
        if token in point.tokens:
            value = value / how.repetition_penalty if value > 0 else value * how.repetition_penalty
        if answer[token]:
            value -= how.frequency_penalty * answer[token] + how.presence_penalty
        is_bad = any(
            word[-1] == token and text[len(text) - len(word) + 1 :] == list(word[:-1])
            for word in how.bad_words
            if len(word) - 1 <= len(text)
        )
        is_early = point.index < how.min_tokens and token in how.end_token_ids
        if is_bad or is_early or (how.allowed_token_ids and token not in how.allowed_token_ids):
            value = -math.inf
        changed.append(value)
    return changed


TOKENS = st.integers(0, VOCABULARY - 1)
TEXTS = st.lists(TOKENS, min_size=1, max_size=20)
PENALTIES = st.sampled_from([0.0, 0.0, 0.3, -1.5, 2.0])
SAMPLINGS = st.builds(
    Sampling,
    seed=st.just(0),
    max_tokens=st.just(40),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3, 2.0]),
    frequency_penalty=PENALTIES,
    presence_penalty=PENALTIES,
    min_tokens=st.integers(0, 20),
    end_token_ids=st.lists(st.integers(0, VOCABULARY + 3), max_size=3).map(tuple),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    allowed_token_ids=st.one_of(st.just(()), st.lists(TOKENS, max_size=3, unique=True).map(tuple)),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


@st.composite
def points(draw: st.DrawFn) -> SamplePoint:
    tokens = draw(TEXTS)
    return SamplePoint(draw(SAMPLINGS), 0, draw(st.integers(0, len(tokens))), tokens)


ROWS = st.lists(
    st.tuples(points(), st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=300)
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
    logits = torch.tensor([[math.inf, math.nan, -math.inf, 3.0, -3.0]])
    tiny: dict[str, Any] = {"repetition_penalty": 1e-39, "presence_penalty": 2.0}
    sampling = Sampling(seed=0, max_tokens=9, min_tokens=9, end_token_ids=(0, 1), **tiny)
    penalize(logits, [SamplePoint(sampling, 0, 5, [0, 1, 2, 3, 4])])
    infinite, unknown, forbidden, large, small = logits[0].tolist()
    assert infinite == math.inf and math.isnan(unknown) and forbidden == -math.inf
    assert 1e38 < large < math.inf and small == -2.0


def test_forced_tokens_come_whatever_the_model_says() -> None:
    forced = pack_tokens([4, 70_000, 1])
    sampling = Sampling(seed=3, max_tokens=5, temperature=1.0, top_logprobs=1, forced=forced)
    points = [SamplePoint(sampling, 0, index, [8, 4, 1]) for index in (-3, -1)]
    assert [SamplePoint(sampling, 0, index).forced for index in range(-3, 1)] == [4, 70_000, 1, None]
    logits = torch.randn(2, VOCABULARY)
    for row, (sampled, token) in enumerate(zip(sample(Logits(logits.clone()), points), (4, 1), strict=True)):
        assert sampled is not None and sampled.token == token and sampled.logprobs is not None
        assert abs(sampled.logprobs.chosen - torch.log_softmax(logits[row], -1)[token].item()) < 1e-5


def test_what_is_forced_changes_nothing_after_it() -> None:
    penalties: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    penalties |= {"min_tokens": 2, "end_token_ids": (0,)}
    plain = Sampling(seed=9, max_tokens=5, **penalties)
    forced = Sampling(seed=9, max_tokens=8, forced=pack_tokens([4, 4, 1]), **penalties)
    logits = torch.randn(1, VOCABULARY)
    for index in range(3):
        points = [SamplePoint(how, 0, index, [4, 4, 1, *range(2, 2 + index)]) for how in (plain, forced)]
        first, second = (sample(Logits(logits.clone()), [point]) for point in points)
        assert first == second


@pytest.mark.parametrize(
    ("asked", "is_likeliest"),
    [
        ({}, True),
        ({"presence_penalty": 1.0}, False),
        ({"frequency_penalty": 1.0}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"logit_bias": ((3, 1.0),)}, False),
        ({"temperature": 1.0}, False),
        ({"min_tokens": 8}, False),
        ({"min_tokens": 2}, True),
    ],
)
def test_decodes_are_the_likeliest_tokens_only_where_nothing_steers_them(
    asked: dict[str, Any], is_likeliest: bool
) -> None:
    """Penalties were once forgotten for decodes that go on from step to step."""
    plain: dict[str, Any] = {"seed": 1, "max_tokens": 9, "temperature": 0.0}
    samplings = [Sampling(**plain), Sampling(**plain | asked)]
    group = SimpleNamespace(samplings=samplings, engine_note=None, prompts=np.array([4, 4]))
    batch: Any = SimpleNamespace(group=group, first=np.array([6, 6]))
    assert are_likeliest(batch) is is_likeliest
