"""Lengths learned while answering: silent until worth being heard, bounded, the same after a restart."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.core.rest_heads import HEADS, Float32s
from services.predictor.core.rest_learner import RestLearner
from shared.messages.sequence import SequenceKey

WIDTH, EVERY = 8, 16


def state_of(random: np.random.Generator, rest: int, knows: bool) -> Float32s:
    state = random.standard_normal((1, WIDTH)).astype(np.float32)
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
    knowing, guessing = RestLearner("distribution", WIDTH), RestLearner("distribution", WIDTH)
    errors = serve(knowing, 500, knows=True)
    assert knowing.is_better
    assert np.mean(errors[-300:]) < 0.5 * np.mean(errors[:100])
    serve(guessing, 200, knows=False)
    summary = guessing.summary()
    assert guessing.is_better == (summary["head_error_tokens"] < summary["base_error_tokens"])
    assert not RestLearner("rank", WIDTH).is_better, "it knows nothing yet"


def test_what_was_learned_outlives_a_restart() -> None:
    learner = RestLearner("rank", WIDTH)
    serve(learner, 150, knows=True)
    again = RestLearner("rank", WIDTH)
    again.restore(learner.weights())
    state = state_of(np.random.default_rng(5), 40, True)
    asked: tuple[list[SequenceKey], list[tuple[int, int, int]]] = ([("x", 0)], [(20, 33, 500)])
    assert again.observe(*asked, state) == learner.observe(*asked, state)
    assert again.is_better == learner.is_better


def test_answers_that_never_end_are_forgotten() -> None:
    learner = RestLearner("distribution", WIDTH)
    for number in range(4200):
        learner.observe([(str(number), 0)], [(5, 1, 100)], np.zeros((1, WIDTH), np.float32))
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


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(sorted(HEADS)), events=events)
def test_no_order_of_events_breaks_it(kind: str, events: list[tuple[str, int, int, float]]) -> None:
    """Ends before states, states after ends, repeated and falling counts, states that are no numbers."""
    learner = RestLearner(kind, WIDTH)
    for event, number, size, value in events:
        key = (f"r{number}", 0)
        if event == "see":
            [told] = learner.observe([key], [(1 + size, size, 200)], np.full((1, WIDTH), value, np.float32))
            assert min(size + 1, 200) <= told.p50_tokens <= 200
        elif event == "forget":
            learner.forget(key)
        else:
            learner.finish(key, size, censored=event == "cut")
    for name, part in learner.weights().items():
        assert np.isfinite(np.asarray(part, np.float64)).all() or name == "errors"
