"""Biases, tokens that alone are allowed, bad words and tokens that are forced, against a plain loop."""

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.sampling import SamplePoint
from services.worker.engine.sampler import Logits, penalize, sample
from shared.messages.sequence import Sampling, pack_tokens

VOCABULARY = 9
TOKENS = st.integers(0, VOCABULARY - 1)


def reference(logits: list[float], point: SamplePoint) -> list[float]:
    """The contract, one token at a time."""
    sampling, answer = point.sampling, list(point.tokens[len(point.tokens) - point.index :])
    biases = dict(sampling.logit_bias)
    changed = []
    for token, logit in enumerate(logits):
        value = logit + biases.get(token, 0.0)
        is_bad = any(
            word[-1] == token and answer[len(answer) - len(word) + 1 :] == list(word[:-1])
            for word in sampling.bad_words
            if len(word) - 1 <= len(answer)
        )
        if is_bad or (sampling.allowed_token_ids and token not in sampling.allowed_token_ids):
            value = -math.inf
        changed.append(value)
    return changed


@st.composite
def points(draw: st.DrawFn) -> SamplePoint:
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=8))
    biases = draw(st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=3))
    words = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3))
    sampling = Sampling(
        seed=0,
        max_tokens=20,
        logit_bias=tuple(biases.items()),
        allowed_token_ids=tuple(draw(st.lists(TOKENS, max_size=3, unique=True))),
        bad_words=tuple(words),
    )
    return SamplePoint(sampling, 0, draw(st.integers(0, len(tokens))), tokens)


ROWS = st.lists(
    st.tuples(points(), st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY)),
    min_size=1,
    max_size=4,
)


@given(ROWS)
def test_as_a_plain_loop_would(rows: list[tuple[SamplePoint, list[float]]]) -> None:
    logits = torch.tensor([row for _, row in rows])
    expected = [reference(logits[at].tolist(), point) for at, (point, _) in enumerate(rows)]
    penalize(logits, [point for point, _ in rows])
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_forced_tokens_come_whatever_the_model_says() -> None:
    sampling = Sampling(
        seed=3, max_tokens=5, temperature=1.0, top_logprobs=1, forced=pack_tokens([4, 70_000, 1])
    )
    points = [SamplePoint(sampling, 0, index, [8, 4, 1]) for index in (-3, -1)]
    assert [point.forced for point in points] == [4, 1]
    assert SamplePoint(sampling, 0, -2).forced == 70_000
    assert SamplePoint(sampling, 0, 0).forced is None
    logits = torch.randn(2, VOCABULARY)
    found = sample(Logits(logits.clone()), points)
    for row, (sampled, token) in enumerate(zip(found, (4, 1), strict=True)):
        assert sampled is not None and sampled.token == token and sampled.logprobs is not None
        assert abs(sampled.logprobs.chosen - torch.log_softmax(logits[row], -1)[token].item()) < 1e-5


def test_what_is_forced_changes_nothing_after_it() -> None:
    penalties: dict[str, Any] = {
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "min_tokens": 2,
        "end_token_ids": (0,),
    }
    plain = Sampling(seed=9, max_tokens=5, **penalties)
    forced = Sampling(seed=9, max_tokens=8, forced=pack_tokens([4, 4, 1]), **penalties)
    logits = torch.randn(1, VOCABULARY)
    for index in range(3):
        after = [4, 4, 1, *range(2, 2 + index)]
        assert sample(Logits(logits.clone()), [SamplePoint(plain, 0, index, after)]) == sample(
            Logits(logits.clone()), [SamplePoint(forced, 0, index, after)]
        )
