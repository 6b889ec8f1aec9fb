"""The figures of predictions, against counting by hand."""

import pytest

from services.predictor.core.length_model import PredictedLength
from services.predictor.core.report import score


def test_each_figure_is_what_its_name_says() -> None:
    told = PredictedLength(rl_tokens=100, p50_tokens=80, p80_tokens=120, p90_tokens=150, p95_tokens=200)
    report = score([(told, length) for length in (40, 80, 115, 116, 300)], padding=0.15)
    assert report is not None
    assert report.scored == 5
    assert report.mae_tokens == pytest.approx((40 + 0 + 35 + 36 + 220) / 5)
    assert report.within_50_share == report.within_100_share == 0.8
    assert report.under_share == 0.4, "116 and 300 are above 115"
    assert report.over_share == 0.4, "40 and 80 are below"
    assert report.over_tokens == pytest.approx((75 + 35) / 5)
    assert report.below_p50_share == 0.4
    assert report.below_p80_share == report.below_p90_share == report.below_p95_share == 0.8
    assert report.as_dict()["mae_tokens"] == 66.2


def test_nothing_scored_is_no_report() -> None:
    assert score([]) is None
