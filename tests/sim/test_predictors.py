"""Simulated predictors: truth, error, lies, the histogram; always something that is possible."""

from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.contract import PolicySettings
from services.worker.core.costs import find_cost
from shared.messages.commands import LengthPrediction
from sim.case import Machine
from sim.predictors import PREDICTORS, Histogram, Sharpening, find_predictor
from sim.requests import SimRequest
from sim.setup import Setup
from sim.simulation import Simulation


def made(
    index: int = 0, output: int = 50, limit: int = 200, predicted: int | None = None, at_s: float = 0.0
) -> SimRequest:
    return SimRequest(index, at_s, 20, output, limit, predicted)


@given(
    name=st.sampled_from(sorted(PREDICTORS)),
    output=st.integers(2, 200),
    share=st.floats(0, 0.99),
    index=st.integers(0, 1000),
)
def test_predictions_are_possible(name: str, output: int, share: float, index: int) -> None:
    generated = int(share * (output - 1))
    told = find_predictor(name, seed=3, train=[made(i, 10 + i) for i in range(20)]).predict(
        made(index, output), generated
    )
    if name == "none":
        assert told is None
        return
    assert told is not None
    lengths = (told.rl_tokens, told.p50_tokens, told.p80_tokens, told.p90_tokens, told.p95_tokens)
    assert all(generated < tokens <= 200 for tokens in lengths)
    assert list(lengths[1:]) == sorted(lengths[1:])


def test_what_a_trace_brings_is_made_a_distribution() -> None:
    """In whatever unit: what answers were to prompts of which the trace's model said the same."""
    train = [made(i, 20 + i % 5, predicted=1) for i in range(150)]
    train += [made(i, 150 + i % 9, predicted=2) for i in range(150)]
    learned = find_predictor("learned", train=train)
    short, long = (learned.predict(made(predicted=said), 0) for said in (1, 2))
    assert short is not None
    assert long is not None
    assert 18 <= short.p50_tokens <= 26
    assert short.p95_tokens < 60 < 140 < long.p50_tokens
    beyond = learned.predict(made(predicted=1), 60)
    silent = learned.predict(made(), 0)
    assert beyond is not None
    assert beyond.rl_tokens > 60
    assert silent is not None
    assert short.p50_tokens < silent.rl_tokens < long.p50_tokens, "the histogram, where it says nothing"


def test_what_reads_along_knows_ever_more_and_the_policy_hears_of_it() -> None:
    reading = find_predictor("sharpening", seed=3)
    errors = []
    for generated in (0, 400, 900):
        told = [reading.predict(made(i, 1000, 4000), generated) for i in range(200)]
        errors.append(fmean(abs(one.rl_tokens - 1000) for one in told if one))
    assert errors[0] > 2 * errors[1] > 6 * errors[2]
    machine = Machine()
    requests = [made(i, 300, 1024, at_s=0.3 * i) for i in range(40)]
    heard: list[int] = []

    class Hearing(Sharpening):
        def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
            heard.append(generated_tokens)
            return super().predict(request, generated_tokens)

    predictor = Hearing(sigma=0.5, seed=1)
    cost, settings = find_cost(machine.cost), PolicySettings(max_steps=8)
    setup = Setup("kvasir", machine.shape, settings, cost, predictor, is_checked=True)
    assert len(Simulation(setup, requests).run().records) == 40
    assert len(heard) > 40 * (300 // 32 - 2), "again and again"


def test_the_histogram_learns_while_it_runs_only_if_told() -> None:
    frozen, online = Histogram(), Histogram(is_online=True)
    for i in range(300):
        frozen.observe(made(i, 180))
        online.observe(made(i, 180))
    before, after = frozen.predict(made(), 0), online.predict(made(), 0)
    assert before is not None
    assert after is not None
    assert after.p50_tokens > 150 > before.p50_tokens
