"""What is learned of the rest of an answer while it is written: heads, and the learner around them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.core.rest_learner import HEADS, DistributionHead, Float32s, Head, RestLearner
from shared.messages.sequence import SequenceKey

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


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(HEADS)),
    values=st.lists(st.floats(-6e4, 6e4, width=32), min_size=WIDTH, max_size=WIDTH),
    rests=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=40),
    cut=st.booleans(),
)
def test_predictions_are_finite_and_ascend(
    kind: str, values: list[float], rests: list[int], cut: bool
) -> None:
    head = HEADS[kind](WIDTH, 0)
    states = np.tile(np.array(values, np.float32), (len(rests), 1))
    for _ in range(5):
        head.learn(states, np.array(rests), np.full(len(rests), cut))
    told = head.predict(states[:1])
    assert np.isfinite(told).all() and (told >= 1).all() and (np.diff(told[0, 1:]) >= -1e-6).all()
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


INPUTS, EVERY = 8, 16


def state_of(random: np.random.Generator, rest: int, knows: bool) -> Float32s:
    state = random.standard_normal((1, INPUTS)).astype(np.float32)
    if knows:
        state[0, 0] = np.log(rest)
    return state


def serve(learner: RestLearner, answers: int, *, knows: bool, seed: int = 0, most: int = 1000) -> list[float]:
    """Answers of exponential lengths whose states tell what is left, or nothing. Errors of what was told."""
    random = np.random.default_rng(seed)
    errors: list[float] = []
    for number in range(answers):
        key, length = (f"r{seed}-{number}", 0), int(random.exponential(120)) + 2
        for generated in range(1, min(length, most), EVERY):
            state = state_of(random, length - generated, knows)
            [told] = learner.observe([key], [(20, generated, most)], state)
            assert generated < told.p50_tokens <= told.p80_tokens <= told.p95_tokens <= most
            errors.append(abs(told.p50_tokens - length))
        learner.finish(key, min(length, most), censored=length > most)
    assert len(learner) == 0
    return errors


def test_it_speaks_where_states_tell_something_and_is_silent_where_they_do_not() -> None:
    knowing, guessing = RestLearner("distribution", INPUTS), RestLearner("distribution", INPUTS)
    errors = serve(knowing, 500, knows=True)
    assert knowing.is_better and np.mean(errors[-300:]) < 0.5 * np.mean(errors[:100])
    serve(guessing, 200, knows=False)
    summary = guessing.summary()
    assert guessing.is_better == (summary["head_error_tokens"] < summary["base_error_tokens"])
    assert not RestLearner("rank", INPUTS).is_better, "it knows nothing yet"


def test_what_was_learned_outlives_a_restart() -> None:
    learner = RestLearner("rank", INPUTS)
    serve(learner, 150, knows=True)
    again = RestLearner("rank", INPUTS)
    again.restore(learner.weights())
    state = state_of(np.random.default_rng(5), 40, True)
    asked: tuple[list[SequenceKey], list[tuple[int, int, int]]] = ([("x", 0)], [(20, 33, 500)])
    assert again.observe(*asked, state) == learner.observe(*asked, state)
    assert again.is_better == learner.is_better


def test_answers_that_never_end_are_forgotten() -> None:
    learner = RestLearner("distribution", INPUTS)
    for number in range(4200):
        learner.observe([(str(number), 0)], [(5, 1, 100)], np.zeros((1, INPUTS), np.float32))
    assert len(learner) == 4096
    learner.finish(("0", 0), 50, censored=False)
    assert learner.answers == 0, "nobody remembers it"
    learner.finish(("4199", 0), 50, censored=False)
    assert learner.answers == 1
    learner.forget(("4198", 0))
    assert len(learner) == 4094


events = st.lists(
    st.tuples(
        st.sampled_from(["see", "see", "end", "cut", "forget"]),
        st.integers(0, 3),
        st.integers(0, 300),
        st.sampled_from([0.0, 1.0, -6e4, float("nan"), float("inf")]),
    ),
    max_size=60,
)


@settings(max_examples=80)
@given(kind=st.sampled_from(sorted(HEADS)), events=events)
def test_no_order_of_events_breaks_it(kind: str, events: list[tuple[str, int, int, float]]) -> None:
    """Ends before states, states after ends, repeated and falling counts, states that are no numbers."""
    learner = RestLearner(kind, INPUTS)
    for event, number, size, value in events:
        key = (f"r{number}", 0)
        if event == "see":
            [told] = learner.observe([key], [(1 + size, size, 200)], np.full((1, INPUTS), value, np.float32))
            assert min(size + 1, 200) <= told.p50_tokens <= 200
        elif event == "forget":
            learner.forget(key)
        else:
            learner.finish(key, size, censored=event == "cut")
    for name, part in learner.weights().items():
        assert np.isfinite(np.asarray(part, np.float64)).all() or name == "errors"
