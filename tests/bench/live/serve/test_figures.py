"""From cells to figures: ratios within one turn, nothing made up for what was not measured."""

from typing import Any

import pytest

from bench.live.serve import figures


def row(kind: str, side: str, **known: Any) -> dict[str, Any]:
    plain = {
        "rate_per_s": 1.0, "repeat": 0, "requests": 100, "failures": 0, "normalized_ms": 10.0,
        "attained": None, "attained_first": None, "ttft_ms_p50": 5.0, "itl_ms_p50": 4.0, "tok_s": 900.0,
        "engine_share": 0.9,
    }  # fmt: skip
    return {"kind": kind, "side": side, **plain, **known}


def test_the_peer_is_the_yardstick_where_there_is_one() -> None:
    ours = [row("low", "ours_vllm", normalized_ms=4.0)]
    assert figures.yardstick(ours) == "ours_vllm"
    assert figures.limit_ms(ours) == 12.0
    both = [*ours, row("low", "vllm", normalized_ms=6.0), row("search", "vllm")]
    assert figures.yardstick(both) == "vllm"
    assert figures.limit_ms(both) == 18.0
    assert figures.limit_ms([row("burst", "vllm")]) is None


@pytest.mark.parametrize(
    ("of_rate", "sustained"),
    [
        ([row("search", "a", normalized_ms=12.0)], True),
        ([row("search", "a", normalized_ms=12.1)], False),
        ([row("search", "a", normalized_ms=1.0, failures=1)], False),
        ([row("search", "a", normalized_ms=value) for value in (1.0, 99.0, 2.0)], True),
        ([row("search", "a", normalized_ms=value) for value in (1.0, 99.0, 20.0)], False),
    ],
)
def test_a_rate_is_sustained_in_the_median_and_without_failures(
    of_rate: list[dict[str, Any]], sustained: bool
) -> None:
    assert figures.is_sustained(of_rate, 12.0) is sustained


def test_the_parts_multiply_to_the_whole() -> None:
    knees = {"vllm": 4.0, "ours_vllm": 5.0, "kvasir": 9.0, "oracle": 10.0}
    made = figures.figures([row("low", "vllm")], knees)
    assert made["sustained_rate_ratio"] == pytest.approx(2.25)
    assert made["policy_factor"] == pytest.approx(1.8)
    parts = made["engine_factor"] * made["policy_factor_oracle"] * made["prediction_factor"]
    assert parts == pytest.approx(made["sustained_rate_ratio"])
    assert made["sustained_kvasir"] == 9.0


def test_what_is_not_measured_has_no_figure() -> None:
    made = figures.figures([row("burst", "vllm", tok_s=700.0)], {"kvasir": 3.0})
    assert made == {"sustained_kvasir": 3.0, "burst_tok_s_vllm": 700.0}


def test_levels_are_compared_turn_by_turn() -> None:
    rows = [
        row("beyond", side, repeat=turn, rate_per_s=6.0, attained=share, attained_first=0.5)
        for side, shares in {"vllm": (0.2, 0.3, 0.0), "kvasir": (0.8, 0.9, 0.5)}.items()
        for turn, share in enumerate(shares)
    ]
    rows.append(
        row("beyond", "kvasir", repeat=1, rate_per_s=7.0, attained=0.1)
    )  # of an earlier, coarser knee
    made = figures.figures([row("low", "vllm"), *rows], {"vllm": 5.0})
    assert made["slo_vllm"] == 0.2
    assert made["slo_ratio"] == pytest.approx(4.0)
    assert made["slo_ratio_worst"] == pytest.approx(3.0)  # 0 counts as one request of a hundred: 50
    assert made["slo_first_ratio"] == 1.0
    assert "slo_policy_factor" not in made
    assert not any(name.startswith("slo") for name in figures.figures(rows, {"kvasir": 5.0}))
    unmatched = [row("beyond", "vllm", rate_per_s=6.0, attained=0.2), *rows[4:5]]
    assert "slo_ratio" not in figures.figures(unmatched, {"vllm": 5.0})


def test_a_table_has_a_line_for_every_cell_and_a_curve_no_burst() -> None:
    rows = [row("burst", "a"), row("search", "a", normalized_ms=30.0), row("search", "a", normalized_ms=10.0)]
    assert len(figures.table(rows).rows) == 3
    assert figures.curves(rows) == {"a": [(1.0, 0.02)]}


def test_the_headline_is_about_rates_and_levels() -> None:
    made = figures.figures([row("low", "vllm")], {"vllm": 1.0, "kvasir": 2.0})
    assert figures.headline(made) == ["sustained_vllm", "sustained_kvasir", "sustained_rate_ratio"]
