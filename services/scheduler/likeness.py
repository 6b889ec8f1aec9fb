"""Whether a worker serves what the others serve: one name, one set of weights, one configuration. Pure.

An answer is resumed on another worker in mid-sentence, so all workers of a stack must hold the same model;
one that does not gets no work. Where nobody has work yet, what most of them serve counts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from shared.errors import ModelMismatch
from shared.messages.reports import WorkerReported

_SHOWN = 8
"""Digits of a digest that a person is shown."""


def prevailing(reports: Iterable[WorkerReported]) -> WorkerReported | None:
    """One of those that serve what most serve; of equally many, with the lowest worker id."""
    by_id = sorted(reports, key=lambda report: report.worker_id)
    counts = Counter((report.model, report.weights) for report in by_id)
    return max(by_id, key=lambda report: counts[(report.model, report.weights)], default=None)


def mismatch(report: WorkerReported, accepted: Sequence[WorkerReported]) -> ModelMismatch | None:
    """Why this worker cannot work beside those; None when it can."""
    for other in accepted:
        if report.model != other.model:
            return ModelMismatch(
                f"{report.worker_id} serves {report.model!r}, {other.worker_id} serves {other.model!r}; "
                "give all workers of a stack the same model and served_name, or another stack",
                param="served_name",
            )
        if report.weights and other.weights and report.weights != other.weights:
            return ModelMismatch(
                f"{report.worker_id} and {other.worker_id} both serve {report.model!r}, with different "
                f"weights or configurations ({report.weights[:_SHOWN]}…, {other.weights[:_SHOWN]}…); load "
                "the same files, in the same dtype, on all of them",
                param="model",
            )
    return None
