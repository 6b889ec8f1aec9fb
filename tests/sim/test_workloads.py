"""Workloads: the same for the same seed, near what they were fitted to, limited, never trained on."""

from pathlib import Path
from statistics import fmean

import pytest

from shared.errors import ConfigError
from sim.workloads import WORKLOADS, Source, limit_tokens, poisson_requests, trace_requests, training_requests

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
    assert all(
        one.arrival_s == 0
        for one in poisson_requests(Source("alpaca"), count=9, rate_per_s=float("inf"), seed=0)
    )


def test_what_is_trained_on_is_never_replayed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{i},5\n" for i in range(1, 301)))
    source = Source(path=path)
    replayed = {one.prompt_tokens for one in poisson_requests(source, count=200, rate_per_s=1, seed=0)}
    trained = {one.prompt_tokens for one in training_requests(source, count=100, seed=0)}
    assert len(replayed) == 200
    assert not replayed & trained
    assert limit_tokens(source) == 256


def test_a_trace_keeps_its_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n3,1,2\n9,3,4\n")
    assert [one.arrival_s for one in trace_requests(Source(path=path), speed=2.0)] == [0.0, 3.0]
    with pytest.raises(ConfigError, match="no arrival times"):
        trace_requests(Source("alpaca"))
