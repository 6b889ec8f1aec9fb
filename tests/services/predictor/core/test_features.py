"""Hashed token sequences of a batch are those of its prompts one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.core.features import BUCKETS, features_of
from shared.messages.sequence import pack_tokens

prompts_of = st.lists(st.lists(st.integers(0, 200_000), max_size=400), min_size=1, max_size=6)


def split(prompts: list[bytes]) -> list[set[int]]:
    features = features_of(prompts)
    ends = [*features.offsets[1:], len(features.buckets)]
    return [
        {int(bucket) for bucket in features.buckets[start:end]}
        for start, end in zip(features.offsets, ends, strict=True)
    ]


@settings(max_examples=50, deadline=None)
@given(prompts=prompts_of)
def test_a_prompt_looks_the_same_alone_and_among_others(prompts: list[list[int]]) -> None:
    packed = [pack_tokens(prompt) for prompt in prompts]
    together = split(packed)
    assert together == [split([one])[0] for one in packed]
    features = features_of(packed)
    assert len(features.weights) == len(features.buckets)
    assert features.dense.shape[0] == len(prompts)
    assert ((features.buckets >= 0) & (features.buckets < BUCKETS)).all()
    for row, found in enumerate(together):
        if found:
            assert np.isclose(features.weights[features.offsets[row]], 1 / np.sqrt(len(found)))


def test_one_token_more_or_another_order_is_seen() -> None:
    plain, longer, swapped = split([pack_tokens(ids) for ids in ([1, 2, 3], [1, 2, 3, 4], [2, 1, 3])])
    assert plain < longer and swapped != plain


def test_the_middle_of_a_very_long_prompt_is_not_looked_at() -> None:
    head, tail = list(range(250)), list(range(1000, 1300))
    first, second = split([pack_tokens(head + [middle] * 500 + tail) for middle in (7, 8)])
    assert first == second
