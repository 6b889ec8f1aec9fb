"""Figures of made-up cells whose ratios are known."""

from typing import Any

import pytest

from bench.live.engine.figures import failures, figures, table
from bench.live.engine.workload import BatchCell, cells

CELLS = cells([100, 500], [1], 8)


def row(alternation: int, cell: BatchCell, side: str, tok_s: float, **other: Any) -> dict[str, Any]:
    return {
        "alternation": alternation,
        "cell": cell.name,
        "side": side,
        "tok_s": tok_s,
        "decode_tok_s": tok_s * 2,
        "failures": 0,
        "client_share": 0.1,
        **other,
    }


def both(alternation: int, cell: BatchCell, ours: float, theirs: float) -> list[dict[str, Any]]:
    return [row(alternation, cell, "kvasir", ours), row(alternation, cell, "vllm", theirs)]


def test_ratios_are_taken_within_an_alternation_and_contexts_combined_within_it() -> None:
    short, long = CELLS
    rows = [
        *(one for turn, factor in enumerate((2.0, 3.0, 4.0)) for one in both(turn, short, factor * 7, 7.0)),
        *(one for turn, factor in enumerate((8.0, 3.0, 1.0)) for one in both(turn, long, factor, 1.0)),
    ]
    made = figures(rows, CELLS, "vllm")
    assert made["tok_s_ratio_b1_ctx100"] == pytest.approx(3.0)
    assert made["tok_s_ratio_b1_ctx100_worst"] == pytest.approx(2.0)
    assert made["tok_s_ratio_b1_ctx500"] == pytest.approx(3.0)
    assert made["tok_s_ratio_b1"] == pytest.approx(3.0)  # of 4, 3 and 2: roots of 16, 9 and 4
    assert made["tok_s_ratio_b1_worst"] == pytest.approx(2.0)
    assert made["tok_s_b1_ctx100_vllm"] == 7.0
    assert made["decode_ratio_b1_ctx500"] == pytest.approx(3.0)
    assert made["client_share_max"] == 0.1
    assert len(table(rows, CELLS, "vllm").rows) == 2


def test_what_is_not_complete_has_no_figure() -> None:
    short, _ = CELLS
    rows = [*both(0, short, 4.0, 2.0), row(1, short, "kvasir", 100.0)]
    made = figures(rows, CELLS, "vllm")
    assert made["tok_s_ratio_b1_ctx100"] == made["tok_s_ratio_b1_ctx100_worst"] == 2.0
    assert "tok_s_ratio_b1_ctx500" not in made
    assert figures([], CELLS, "vllm") == {}


def test_an_alternation_with_failures_is_counted_and_not_compared() -> None:
    short, _ = CELLS
    rows = [*both(0, short, 4.0, 2.0), row(1, short, "kvasir", 90.0, failures=3), row(1, short, "vllm", 1.0)]
    assert figures(rows, CELLS, "vllm")["tok_s_ratio_b1_ctx100"] == 2.0
    assert failures(rows) == 3


def test_a_side_called_directly_has_no_latencies() -> None:
    short, _ = CELLS
    rows = [
        {"alternation": 0, "cell": short.name, "side": side, "tok_s": rate, "failures": 0}
        for side, rate in (("kvasir", 4.0), ("transformers", 2.0))
    ]
    made = figures(rows, [short], "transformers")
    assert made["tok_s_ratio_b1"] == pytest.approx(2.0)
    assert not [name for name in made if "decode" in name or "ttft" in name]
