"""One simulated cell, with the peer's service level; a live one is in `test_experiment.py`."""

from pathlib import Path

import pytest

from bench.kit.load import Answer
from bench.live.chats import LiveRun
from bench.simulated.experiment.cells import CellQuestion, _live_figures, answer_simulated, source_of
from bench.simulated.experiment.grid import read_experiment

TEXT = """
grid: {policy: [vllm], predictor: [none], placement: [least_work], trace: [alpaca], rate: [2]}
requests: 30
"""


def test_a_cell_has_figures_and_a_row_per_request(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(TEXT)
    experiment = read_experiment(tmp_path / "e.yaml")
    answer = answer_simulated(CellQuestion(experiment, experiment.cells[0]))
    assert answer.figures["requests"] == len(answer.rows) == 30
    assert answer.figures["failures"] == 0
    assert answer.figures["slo"] > 0.9, "an idle worker keeps its levels"


def test_a_name_is_a_workload_and_all_else_a_file() -> None:
    assert source_of("alpaca").workload == "alpaca"
    assert source_of("mine.csv").path == Path("mine.csv")


def test_live_figures_leave_out_what_failed() -> None:
    good = Answer(10.0, [11.0, 12.0], 14.0, completion_tokens=4)
    run = LiveRun(10.0, [good, Answer(10.0, error="refused")], [], 99)
    figures = _live_figures(run)
    assert (figures["requests"], figures["failures"]) == (2, 1)
    assert figures["normalized_s"] == pytest.approx(1.0)
    assert figures["tokens_per_s"] == pytest.approx(1.0)
    assert figures["ttft_s_p50"] == pytest.approx(1.0)
    assert "jct_s" not in _live_figures(LiveRun(0.0, [Answer(0.0, error="refused")], [], 9))
