"""The audit of predictions."""

from services.predictor.core.length_model import PredictedLength
from services.predictor.core.report import PredictionAudit


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
    assert summary["finished"] == 4
    assert summary["scored"] == 2
    assert summary["mae_tokens"] == 70.0
    assert summary["within_50_share"] == 0.0
    assert summary["within_100_share"] == 1.0
    assert summary["under_share"] == 0.5
    audit.check_integrity()


def test_memory_is_bounded() -> None:
    audit = PredictionAudit(waiting_limit=3, window=2)
    for number in range(10):
        audit.on_predicted((str(number), 0), says(1))
        audit.check_integrity()
    for number in range(10):
        audit.on_finished((str(number), 0), 1, censored=False)
    assert audit.summary()["scored"] == 2


def test_before_anything_ended_there_are_counts_only() -> None:
    assert PredictionAudit().summary() == {"predictions": 0, "finished": 0, "scored": 0}
