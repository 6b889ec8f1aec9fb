"""Accuracy of predictions, against counting by hand."""

import pytest

from services.predictor.core.length_model import PredictedLength
from services.predictor.core.report import PredictionAudit, score


def test_each_figure_is_what_its_name_says() -> None:
    told = PredictedLength(rl_tokens=100, p50_tokens=80, p80_tokens=120, p90_tokens=150, p95_tokens=200)
    report = score([(told, length) for length in (40, 80, 115, 116, 300)])
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


def says(tokens: int) -> PredictedLength:
    return PredictedLength(tokens, tokens, tokens, tokens, tokens)


def test_scores_first_predictions_of_whole_answers() -> None:
    audit = PredictionAudit()
    audit.on_predicted(("a", 0), says(100))
    audit.on_predicted(("a", 0), says(500))
    audit.on_predicted(("b", 0), says(10))
    audit.on_predicted(("c", 0), says(10))
    audit.on_finished(("a", 0), 40, censored=False)
    audit.on_finished(("b", 0), 90, censored=False)
    audit.on_finished(("c", 0), 90, censored=True)
    audit.on_finished(("unknown", 0), 90, censored=False)
    summary = audit.summary()
    assert (summary["finished"], summary["scored"], summary["mae_tokens"]) == (4, 2, 70.0)
    audit.check_integrity()


def test_memory_is_bounded() -> None:
    audit = PredictionAudit(waiting_limit=3, window=2)
    assert audit.summary() == {"predictions": 0, "finished": 0, "scored": 0}
    for number in range(10):
        audit.on_predicted((str(number), 0), says(1))
        audit.check_integrity()
    for number in range(10):
        audit.on_finished((str(number), 0), 1, censored=False)
    assert audit.summary()["scored"] == 2
