"""What a run is made of, and what is made of it: traces, workloads, predictors, figures."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.contract import PolicySettings
from services.worker.core.costs import find_cost
from shared.errors import ConfigError
from shared.messages.commands import LengthPrediction
from sim.case import Machine
from sim.knee import TOLERANCE, sustained_rate
from sim.meters import WorkerMeter
from sim.predictors import PREDICTORS, Histogram, Sharpening, find_predictor
from sim.requests import ServedRecord, SimRequest
from sim.setup import Outcome, Setup
from sim.simulation import Simulation
from sim.summary import ServiceLevel, summarize
from sim.sweep import sweep
from sim.traces import TraceRow, read_trace
from sim.workloads import WORKLOADS, Source, limit_tokens, poisson_requests, trace_requests, training_requests
from tests.sim.simple import SHAPE, request


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_our_own_format(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,predicted_tokens\n5,10,20,30\n6.5,1,2,\n"
    rows = read_trace(write(tmp_path, "t.csv", text))
    assert rows == [TraceRow(10, 20, 0.0, 30), TraceRow(1, 2, 1.5, None)]


def test_azure_counts_from_its_first_line(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    text += "2023-11-16 18:15:50.9951690,396,109\n"
    first, second = read_trace(write(tmp_path, "azure.csv", text))
    assert first == TraceRow(374, 44, 0.0) and second.arrival_s == pytest.approx(4.314579, abs=1e-4)


def test_mooncake_is_in_milliseconds(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 7, "output_length": 5, "hash_ids": [1]} for at in (1000, 3500)]
    path = write(tmp_path, "m.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert [row.arrival_s for row in read_trace(path)] == [0.0, 2.5]


@pytest.mark.parametrize(
    ("text", "says"),
    [("a,b\n1,2\n", "columns"), ("prompt_tokens,output_tokens\n1,x\n", "cannot be read"), ("", "no request")],
)
def test_what_is_no_trace_is_told(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(write(tmp_path, "t.csv", text))


MEANS = {
    "sharegpt": (175, 322),
    "alpaca": (20, 64),
    "books": (1589, 682),
    "azure": (1083, 214),
    "azure_code": (2048, 28),
    "mooncake": (12035, 343),
    "turns": (2340, 439),
    "arxiv": (2683, 186),
    "lmsys": (175, 177),
}
"""Of the data itself; of books the answers are the paper's."""


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_generated_lengths_are_near_the_data(name: str) -> None:
    made = poisson_requests(Source(name), count=4000, rate_per_s=2.0, seed=1)
    prompt, output = MEANS[name]
    assert fmean(one.prompt_tokens for one in made) == pytest.approx(prompt, rel=0.15)
    assert fmean(one.output_tokens for one in made) == pytest.approx(output, rel=0.08)
    assert made[-1].arrival_s == pytest.approx(2000, rel=0.08)
    assert {one.max_tokens for one in made} == {WORKLOADS[name].max_tokens}


def test_a_seed_fixes_requests_and_the_rate_only_stretches_them() -> None:
    slow = poisson_requests(Source("alpaca"), count=50, rate_per_s=1.0, seed=4)
    fast = poisson_requests(Source("alpaca"), count=50, rate_per_s=4.0, seed=4)
    assert slow == poisson_requests(Source("alpaca"), count=50, rate_per_s=1.0, seed=4)
    assert [one.output_tokens for one in slow] == [one.output_tokens for one in fast]
    assert fast[-1].arrival_s == pytest.approx(slow[-1].arrival_s / 4)
    at_once = poisson_requests(Source("alpaca"), count=9, rate_per_s=float("inf"), seed=0)
    assert all(one.arrival_s == 0 for one in at_once)


def test_what_is_trained_on_is_never_replayed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{i},5\n" for i in range(1, 301)))
    source = Source(path=path)
    replayed = {one.prompt_tokens for one in poisson_requests(source, count=200, rate_per_s=1, seed=0)}
    trained = {one.prompt_tokens for one in training_requests(source, count=100, seed=0)}
    assert len(replayed) == 200 and not replayed & trained and limit_tokens(source) == 256


def test_a_trace_keeps_its_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n3,1,2\n9,3,4\n")
    assert [one.arrival_s for one in trace_requests(Source(path=path), speed=2.0)] == [0.0, 3.0]
    with pytest.raises(ConfigError, match="no arrival times"):
        trace_requests(Source("alpaca"))


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
    assert all(generated < tokens <= 200 for tokens in lengths) and list(lengths[1:]) == sorted(lengths[1:])


def test_what_a_trace_brings_is_made_a_distribution() -> None:
    """In whatever unit: what answers were to prompts of which the trace's model said the same."""
    train = [made(i, 20 + i % 5, predicted=1) for i in range(150)]
    train += [made(i, 150 + i % 9, predicted=2) for i in range(150)]
    learned = find_predictor("learned", train=train)
    short, long = (learned.predict(made(predicted=said), 0) for said in (1, 2))
    assert short is not None and long is not None
    assert 18 <= short.p50_tokens <= 26 and short.p95_tokens < 60 < 140 < long.p50_tokens
    beyond, silent = learned.predict(made(predicted=1), 60), learned.predict(made(), 0)
    assert beyond is not None and beyond.rl_tokens > 60 and silent is not None
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
    assert before is not None and after is not None and after.p50_tokens > 150 > before.p50_tokens


def outcome() -> Outcome:
    fast = ServedRecord(request(0, output=5), first_token_s=1.0, end_s=5.0, prefill_s=1.0, decode_s=4.0)
    slow = ServedRecord(
        request(1, output=3, arrival_s=2.0),
        first_token_s=8.0,
        end_s=20.0,
        queue_s=4.0,
        prefill_s=2.0,
        decode_s=4.0,
    )
    slow.pauses, slow.preempted_s = 1, 8.0
    meter = WorkerMeter(busy_s=10, steps=5, forward_tokens=40, computed_token_s=320, allocated_block_s=80.0)
    return Outcome([fast, slow], [meter], SHAPE, 20.0)


def test_figures() -> None:
    figures = summarize(outcome(), ServiceLevel(prefill_s=1.0, token_s=1.0))
    assert figures["normalized_s"] == pytest.approx((5 / 5 + 18 / 3) / 2)
    assert figures["tokens_per_s"] == pytest.approx(8 / 20) and figures["slo"] == 0.5
    assert figures["alloc_failures"] == 0.5 and figures["kvc_utilization"] == pytest.approx(0.5)
    assert figures["kvc_allocated"] == pytest.approx(0.5)
    assert figures["tbt_s"] == pytest.approx((4 / 4 + 12 / 2) / 2)
    assert figures["queue_s"] + figures["preempted_s"] == pytest.approx(6.0)


def square(number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return number * number


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order_and_told(processes: int) -> None:
    told: list[tuple[int, int]] = []
    results = sweep(square, [3, 1, 2], processes=processes, on_result=lambda a, r: told.append((a, r)))
    assert results == [9, 1, 4] and sorted(told) == [(1, 1), (2, 4), (3, 9)]


@given(edge=st.floats(0.01, 3.9))
def test_the_edge_is_found(edge: float) -> None:
    found = sustained_rate(lambda rate: rate <= edge, 1.0)
    assert found <= edge <= found * (1 + TOLERANCE) * (1 + 1e-9)
