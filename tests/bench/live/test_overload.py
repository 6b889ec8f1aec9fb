"""What counts as goodput and as a refusal, and a short run against a real stack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kit.load import Answer
from bench.kit.provenance import ROOT
from bench.live.overload import Part, figures, is_refused


def answer(sent_s: float, took_s: float = 1.0, tokens: int = 10, error: str = "") -> Answer:
    ended_s = sent_s + took_s
    event_s = [] if error else [sent_s + took_s / 2]
    return Answer(sent_s, event_s, ended_s, tokens, prompt_tokens=30, error=error)


REFUSED = 'status 429: {"error":{"message":"all workers are busy"}}'


def test_goodput_is_what_was_completed_within_the_window() -> None:
    answers = [
        answer(0.0),
        answer(9.5),
        answer(12.0),
        answer(19.5),
        answer(13.0, 0.01, error=REFUSED),
        answer(14.0, 0.03, error=REFUSED),
        answer(15.0, error="connection lost"),
    ]
    part = Part(answers, 10.0, 20.0)
    assert len(part.ended) == 2 and part.requests_per_s == pytest.approx(0.2)
    assert part.tokens_per_s == pytest.approx(2 * 40 / 10.0)
    assert (len(part.refused), len(part.failed), len(part.sent)) == (2, 1, 5)


def test_only_what_is_told_to_come_again_is_a_refusal() -> None:
    assert is_refused(answer(0.0, error=REFUSED))
    assert is_refused(answer(0.0, error="status 503: away"))
    assert not is_refused(answer(0.0, error="status 500: broken"))
    assert not is_refused(answer(0.0))


def test_figures_are_ratios_of_the_parts() -> None:
    peak = Part([answer(float(at)) for at in range(10)], 0.0, 10.0)
    over = Part([*peak.answers, *(answer(5.0, 0.001 * at, error=REFUSED) for at in range(1, 101))], 0.0, 10.0)
    busy = Part([answer(1.0, 2.0)], 0.0, 10.0)
    flooded = Part([answer(1.0, 2.1), answer(2.0, 0.01, error=REFUSED)], 0.0, 10.0)
    found = figures(peak, over, busy, flooded)
    assert found["goodput_ratio"] == pytest.approx(1.0)
    assert found["refusal_ms_p99"] == pytest.approx(99.0)
    assert found["flood_p99_ratio"] == pytest.approx(1.05)
    assert found["steady_refused"] == 1.0
    assert found["refused_share"] == pytest.approx(100 / 110)
    assert "refusal_ms_p99" not in figures(peak, peak, busy, busy)


@pytest.mark.slow
@pytest.mark.stack
def test_a_short_run_refuses_early_and_fails_nobody(tmp_path: Path) -> None:
    words = ["--quick", "--engine", "simulated", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "overload", *words], cwd=ROOT, check=True, timeout=400)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failures"] == 0
    found = result["figures"]
    assert found["goodput_ratio"] > 0.8 and found["refused_share"] > 0.1
    assert found["refusal_ms_p50"] < 1000 and found["steady_refused"] == 0
