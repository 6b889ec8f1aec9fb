"""The predictor bench, on exercises made by templates."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from bench.micro import predictor
from services.predictor.core.length_model import LengthSample
from services.predictor.samples import write_samples
from shared.messages.sequence import pack_tokens
from sim.traces import read_trace
from sim.workloads import Source, has_predictions
from tests.bench.rig import context_of


def test_a_file_of_ones_own_is_measured(tmp_path: Path) -> None:
    samples = predictor.templates(random.Random(0), 600, 0).train
    write_samples(tmp_path / "mine.jsonl", samples)
    outcome = predictor.run(context_of("predictor", tmp_path, "--trace", str(tmp_path / "mine.jsonl")))
    figures = outcome.figures
    assert figures["mae_vs_histogram"] == pytest.approx(figures["mae"] / figures["histogram_mae"])
    assert figures["mae_vs_histogram"] < 0.9, "the request says how long the answer is"
    assert 0 <= figures["within_50"] <= figures["within_100"] <= 1
    assert figures["predict_ms_p50_b32"] > 0
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 300
    errors = [abs(row["length"] - row["p50"]) for row in rows]
    assert np.mean(errors) == pytest.approx(figures["mae"])
    trace = read_trace(tmp_path / "mine.csv")
    assert [row.output_tokens for row in trace] == [row["length"] for row in rows]
    assert has_predictions(Source(path=tmp_path / "mine.csv")), "the simulator can tell what it said"


def test_the_histogram_is_the_median_of_each_bucket() -> None:
    train = [
        LengthSample(pack_tokens([1] * size), length, censored=False)
        for size, length in [(10, 4), (10, 5), (10, 9), (90, 100), (90, 300), (90, 200)]
    ]
    test = [
        LengthSample(pack_tokens([2] * 10), 6, censored=False),
        LengthSample(pack_tokens([2] * 90), 190, censored=False),
        LengthSample(pack_tokens([2] * 90), 1, censored=True),
    ]
    assert predictor.histogram_mae(train, test) == pytest.approx((1 + 10) / 2)
