"""Sampling against its definition; repeatable, and independent of everything it should be independent of."""

import math
from collections import Counter
from ctypes import CDLL

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.drawing import arrivals, key_of
from services.worker.engine.native.library import load
from services.worker.engine.sampler import Logits, measure
from services.worker.engine.sampler import sample as sample_logits
from shared.messages.sequence import Sampling


def point(index: int, *, choice: int = 0, seed: int = 1, **settings: float) -> SamplePoint:
    return SamplePoint(Sampling(seed=seed, max_tokens=9, **settings), choice, index)  # type: ignore[arg-type]


_LIBRARY: list[CDLL | None] = [None]


@pytest.fixture(params=["torch", "native"], autouse=True, scope="module")
def sampler(request: pytest.FixtureRequest) -> None:
    """Everything holds for both."""
    _LIBRARY[:] = [load() if request.param == "native" else None]


def sample(logits: torch.Tensor, points: list[SamplePoint]) -> list[Sampled | None]:
    return sample_logits(Logits(logits), points, _LIBRARY[0])


def draw(logits: torch.Tensor, points: list[SamplePoint]) -> list[int | None]:
    """Tokens only; the logits are kept."""
    return [None if sampled is None else sampled.token for sampled in sample(logits.clone(), points)]


def reference(logits: list[float], drawn: SamplePoint) -> int:
    """The contract, one token at a time in plain Python."""
    sampling = drawn.sampling
    if sampling.temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    highest = max(logits)
    weights = [math.exp((logit - highest) / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    likely = [token for token in order if weights[token] >= sampling.min_p]
    kept = likely[: sampling.top_k] if sampling.top_k else likely
    total = sum(weights[token] for token in kept)
    nucleus: list[int] = []
    mass = 0.0
    for token in kept:
        if mass >= sampling.top_p * total and sampling.top_p < 1 and nucleus:
            break
        nucleus.append(token)
        mass += weights[token]
    return min(nucleus, key=lambda token: arrival(drawn, token) / weights[token])


def scatter(value: int) -> int:
    value = (value ^ value >> 16) * 0x7FEB352D % 2**32
    value = (value ^ value >> 15) * 0x846CA68B % 2**32
    return value ^ value >> 16


def arrival(drawn: SamplePoint, token: int) -> float:
    """In its race, were its rate 1."""
    key = key_of(drawn.sampling.seed, drawn.choice, drawn.index)
    mixed = scatter((token * 0x9E3779B1 + key) % 2**32)
    above, below = scatter(mixed ^ key >> 32), scatter((mixed + 0x85EBCA6B) % 2**32)
    return -math.log1p(-(above + (below + 0.5) / 2**32) / 2**32)


@settings(max_examples=200)
@given(
    st.lists(st.integers(-600, 600).map(lambda n: n / 100), min_size=1, max_size=30, unique=True),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.7]),
            st.sampled_from([0.05, 0.31, 0.5, 0.93, 1.0]),
            st.integers(0, 31),
            st.integers(-(2**63), 2**64 - 1),
            st.sampled_from([0.0, 0.0, 0.0123, 0.1789, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_tokens_are_those_of_the_definition(
    logits: list[float], settings_of_rows: list[tuple[float, float, int, int, float]]
) -> None:
    points = [
        point(row, seed=seed, choice=row % 2, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        for row, (temperature, top_p, top_k, seed, min_p) in enumerate(settings_of_rows)
    ]
    drawn = draw(torch.tensor([logits] * len(points)), points)
    assert drawn == [reference(logits, each) for each in points]


@settings(max_examples=80)
@given(
    st.integers(0, 2**31),
    st.integers(1, 700),
    st.sampled_from([0.01, 1.0, 4.0]),
    st.builds(
        point,
        st.integers(0, 99),
        seed=st.integers(0, 2**64 - 1),
        temperature=st.sampled_from([0.2, 0.7, 1.0, 1.9]),
        min_p=st.sampled_from([0.0, 0.0, 0.0123, 0.1789, 1.0]),
        top_p=st.sampled_from([0.05, 0.31, 0.93, 0.999, 1.0]),
        top_k=st.sampled_from([0, 0, 1, 3, 40, 200, 100_000]),
    ),
)
def test_tokens_of_large_vocabularies_are_those_of_the_definition(
    seed: int, vocabulary: int, spread: float, drawn: SamplePoint
) -> None:
    """Within rounding of the nucleus's border one token more or less is kept, and may be the first."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    top_p, answers = drawn.sampling.top_p, set()
    for near in (top_p, top_p * (1 - 1e-5), min(top_p * (1 + 1e-5), 1.0)):
        sampling = msgspec.structs.replace(drawn.sampling, top_p=near)
        answers.add(reference(logits[0].tolist(), SamplePoint(sampling, 0, drawn.index)))
    assert draw(logits, [drawn])[0] in answers


@pytest.mark.parametrize("top_k", [0, 5000])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_flat_nucleus_of_a_large_vocabulary(top_p: float, top_k: int) -> None:
    logits = torch.randn(1, 50_001, generator=torch.Generator().manual_seed(4)) * 0.1
    drawn = point(7, top_p=top_p, top_k=top_k)
    assert draw(logits, [drawn]) == [reference(logits[0].tolist(), drawn)]


@pytest.mark.parametrize(("top_k", "top_p", "allowed"), [(0, 1.0, 5), (3, 1.0, 3), (0, 0.6, 2), (1, 1.0, 1)])
def test_frequencies_follow_the_probabilities(top_k: int, top_p: float, allowed: int) -> None:
    probabilities = [0.4, 0.3, 0.15, 0.1, 0.05]
    logits = torch.tensor([probabilities]).log()
    draws = 4000
    points = [point(index, top_k=top_k, top_p=top_p) for index in range(draws)]
    counts = Counter(draw(logits.expand(draws, -1), points))
    total = sum(probabilities[:allowed])
    assert set(counts) == set(range(allowed))
    for token in range(allowed):
        share = probabilities[token] / total
        deviation = math.sqrt(share * (1 - share) / draws)
        assert abs(counts[token] / draws - share) <= 4 * deviation


def test_keys_depend_on_each_part() -> None:
    assert key_of(1, 0, 0) == key_of(1, 0, 0)
    keys = {key_of(s, c, i) for s in (-1, 1, 2, 2**63) for c in range(50) for i in range(50)}
    assert len(keys) == 4 * 50 * 50 and all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize(("keys", "tokens"), [(1, 20_000), (20_000, 1), (200, 100)])
def test_times_are_exponentially_distributed(keys: int, tokens: int) -> None:
    """Over tokens and over draws: Kolmogorov and Smirnov's distance at a chance of 1 in 1,000."""
    times = arrivals([key_of(3, 0, index) for index in range(keys)], tokens, torch.device("cpu"))
    below = 1 - (-times.flatten().sort().values).exp()
    count = len(below)
    places = torch.arange(count, dtype=torch.float64)
    apart = torch.maximum((places + 1) / count - below, below - places / count).max()
    assert float(apart) < 1.95 / math.sqrt(count)
    if keys > 1 and tokens > 1:
        centred = times - 1
        assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 4 / math.sqrt(count)
        assert abs(float((centred[1:] * centred[:-1]).mean())) < 4 / math.sqrt(count)


def test_logits_that_differ_a_little_seldom_give_another_token() -> None:
    """As often as their distributions have to differ, at most twice: answers that resume compute logits whose
    last bits differ, and a running sum over the vocabulary made another token of that in a hundred times as
    many draws."""
    draws, vocabulary = 6000, 2000
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(1, vocabulary, generator=generator) * 2
    other = logits + 0.01 * torch.randn(1, vocabulary, generator=generator)
    distance = float((logits.softmax(-1) - other.softmax(-1)).abs().sum() / 2)
    points = [point(index) for index in range(draws)]
    first, second = (draw(each.expand(draws, -1), points) for each in (logits, other))
    differ = sum(a != b for a, b in zip(first, second, strict=True)) / draws
    bound = 2 * distance / (1 + distance)
    assert 0 < differ <= bound + 4 * math.sqrt(bound / draws)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_finite_logits_gives_none_and_spoils_no_other(bad: float) -> None:
    logits = torch.full((3, 5), -math.inf)
    logits[:, 1], logits[1, 2] = 0.0, bad
    drawn = draw(logits, [point(0), point(1), point(2, temperature=0.0)])
    assert drawn == [1, None, 1], "nor is a token drawn that may not be"
    logits, how = torch.zeros(2, 5), Sampling(seed=0, max_tokens=9, top_logprobs=2, frequency_penalty=0.1)
    logits[0, 2] = bad
    first, second = sample(logits, [SamplePoint(how, 0, 1, [3])] * 2)
    assert first is None and second is not None and second.logprobs is not None
    assert second.logprobs.chosen == pytest.approx(-math.log(5))


def test_tokens_as_likely_as_the_last_one_kept_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(400, -1)
    assert set(draw(logits, [point(index, top_k=2) for index in range(400)])) == {0, 1, 2}


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from([0.013, 0.17, 0.6]), st.sampled_from([0.4, 1.0, 1.9]))
def test_min_p_leaves_what_transformers_leaves(seed: int, min_p: float, temperature: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 2
    kept = MinPLogitsWarper(min_p)(torch.tensor([[0]]), logits / temperature)[0]  # type: ignore[arg-type]
    probabilities = kept.softmax(-1)
    points = [point(index, seed=seed, temperature=temperature, min_p=min_p) for index in range(50)]
    kept_tokens = probabilities.nonzero().flatten().tolist()
    expected = [
        min(kept_tokens, key=lambda token: arrival(each, token) / float(probabilities[token]))
        for each in points
    ]
    assert draw(logits.expand(50, -1), points) == expected


REQUESTS = [
    Sampling(seed=3, max_tokens=99),
    Sampling(seed=4, max_tokens=99, temperature=0.0, repetition_penalty=1.5, top_logprobs=4),
    Sampling(seed=5, max_tokens=99, temperature=0.0, top_logprobs=0),
    Sampling(seed=6, max_tokens=99, frequency_penalty=1.0, presence_penalty=0.5, top_logprobs=2, min_p=0.05),
    Sampling(seed=7, max_tokens=99, min_tokens=9, end_token_ids=(1, 2), temperature=0.0, top_p=0.5),
    Sampling(seed=8, max_tokens=99, min_tokens=3, end_token_ids=(4,), top_k=5, presence_penalty=-2.0),
]


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=8))
def test_mixed_batches_are_their_rows(seed: int, chosen: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(chosen), 40, generator=generator) * 3
    points = [
        SamplePoint(REQUESTS[request], row % 2, row, [row, *range(2, 4 + row)])
        for row, request in enumerate(chosen)
    ]
    alone = [sample(logits[row : row + 1].clone(), points[row : row + 1])[0] for row in range(len(points))]
    together = sample(logits.clone(), points)
    for one, other in zip(alone, together, strict=True):
        assert one is not None and other is not None and one.token == other.token
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert other.logprobs.chosen == pytest.approx(one.logprobs.chosen, abs=1e-5)
            assert [token for token, _ in other.logprobs.top] == [token for token, _ in one.logprobs.top]


def test_logprobs_are_those_before_penalties_and_temperature() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(6))
    best = int(logits.argmax())
    sampling = Sampling(
        seed=0, max_tokens=9, temperature=0.0, presence_penalty=2.0, repetition_penalty=9.0, top_logprobs=1
    )
    (sampled,) = sample(logits.clone(), [SamplePoint(sampling, 0, 1, [best])])
    raw = logits[0].log_softmax(-1)
    assert sampled is not None and sampled.logprobs is not None and sampled.token != best
    assert sampled.logprobs.chosen == pytest.approx(float(raw[sampled.token]))
    ((likeliest, highest),) = sampled.logprobs.top
    assert likeliest == best and highest == pytest.approx(float(raw[best]))


@settings(max_examples=100)
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
