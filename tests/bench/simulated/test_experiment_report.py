"""What an experiment says at its end: who goes furthest, in 80 columns, and one sentence; a picture."""

import io
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.cli import show
from bench.kit.outcome import Outcome
from bench.simulated.experiment.bench import _draw
from bench.simulated.experiment.grid import GridCell
from bench.simulated.experiment.report import LIMIT, closing, knee_of, reports, tables

RATES = (1.0, 2.0, 3.0, 4.0)


def results(**latencies: tuple[float, ...]) -> list[tuple[GridCell, dict[str, float]]]:
    """By `policy` or `policy__predictor`: normalized latency in s at each rate."""
    made = []
    for name, curve in latencies.items():
        policy, _, predictor = name.partition("__")
        for rate, latency_s in zip(RATES, curve, strict=False):
            cell = GridCell(policy, predictor or "none", "best_fit", "frequent", "alpaca", rate, 0)
            made.append((cell, {"normalized_s": latency_s, "ttft_s_p50": 1.0, "failures": 0.0, "slo": 0.5}))
    return made


@given(st.lists(st.floats(0.001, 1000), min_size=2, max_size=8), st.floats(0.01, 100))
def test_a_knee_lies_between_the_last_rate_that_is_well_and_the_next(
    latencies: list[float], limit: float
) -> None:
    curve = [(float(at), latency) for at, latency in enumerate(latencies, start=1)]
    knee = knee_of(curve, limit)
    over = next((at for at, latency in curve if latency > limit), None)
    if over is None:
        assert knee == float("inf")
    elif over == 1.0:
        assert knee is None
    else:
        assert knee is not None and over - 1 <= knee <= over


def test_those_that_go_furthest_come_first_and_the_sentence_says_how_far() -> None:
    cells = results(slow=(1.0, 9.0, 90.0, 99.0), quick=(1.0, 1.0, 9.0, 90.0), never=(9.0, 9.0, 9.0, 9.0))
    (report,) = reports(cells)
    assert report.limit_s == LIMIT * 1.0
    assert [side[0] for side in report.ranked()] == ["quick", "slow", "never"]
    assert closing(cells) == (
        "On alpaca quick goes furthest, to 2.5 requests/s, 1.67 × slow and never (below the lowest)."
    )
    ranking, by_rate = tables(cells)
    assert [row[:3] for row in ranking.rows] == [(1, "quick", "2.5"), (2, "slow", "1.5"), (3, "never", "<1")]
    assert by_rate.columns == ("policy", "1", "2", "3", "4")


def test_tables_fit_80_columns_and_the_sentence_is_last(tmp_path: Path) -> None:
    cells = results(
        ecoserve_profile__histogram=(0.01234, 0.02345, 0.1, 123.4), vllm__regressor=(0.0123, 0.3, 0.4, 55.5)
    )
    said = io.StringIO()
    outcome = Outcome({"cells": 8.0}, 0, tables(cells), ["a note"], closing=closing(cells))
    show("experiment", outcome, Console(file=said, width=80))
    tabled, _, rest = said.getvalue().partition("experiment")
    assert max(len(line) for line in tabled.splitlines()) <= 80
    assert " ".join(rest.split()).endswith("× vllm.")
    _draw(tmp_path, cells)
    assert (tmp_path / "latency_alpaca.png").read_bytes().startswith(b"\x89PNG")


def test_sides_whose_intervals_overlap_share_a_place() -> None:
    """Nobody is called the fastest who may not be."""
    cells = results(a=(1.0,), b=(1.1,), c=(2.0,))
    reach = {"a": 0.2, "b": 0.2, "c": 0.1}
    for cell, figures in cells:
        for end, sign in (("low", -1), ("high", 1)):
            figures[f"normalized_s_{end}"] = figures["normalized_s"] + sign * reach[cell.policy]
    (ranking,) = tables(cells)
    assert [row[:2] for row in ranking.rows] == [(1, "a"), (1, "b"), (3, "c")]
    assert ranking.rows[0][2] == "1 ±0.2"
    said = closing(cells)
    assert (
        said == "On alpaca a is fastest with 1 s a token, before c (2); the intervals of b overlap with it."
    )
