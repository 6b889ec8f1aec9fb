"""Trains on all but the latest answers, and keeps the new version only if it beats the old on those.

The background learner runs this in a child process, and `train` in the foreground. Blocking. A file of its
own, because it imports torch, which `evaluate` rarely needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import LengthModel, LengthSample
from services.predictor.core.report import LengthReport, evaluate
from services.predictor.models import versions
from services.predictor.models.regressor import RegressorModel
from services.predictor.models.training import TrainingPlan, TrainingProgress, train
from services.predictor.models.versions import Trained


@dataclass(frozen=True)
class Verdict:
    """Result of a training: accuracy of the old and the new version on the same answers."""

    path: Path | None
    """The new version; None if it was not better."""
    old: LengthReport | None
    old_version: str
    new: LengthReport | None

    @property
    def is_better(self) -> bool:
        """Whether the new version has the smaller error, or there is nothing to compare."""
        if self.new is None or self.old is None:
            return True
        return self.new.mae_tokens < self.old.mae_tokens


def hold_trial(
    samples: Sequence[LengthSample],
    directory: Path,
    plan: TrainingPlan,
    *,
    held_out: int,
    only_if_better: bool,
    should_stop: Callable[[], bool] = lambda: False,
    progress: TrainingProgress = lambda done, total, mae: None,
) -> Verdict:
    """Train a version and compare it with the latest in `directory`, or with a histogram of the same data.
    Raises InvalidRequest (too few samples), TimeoutError (stopped before a member was trained), OSError."""
    learned, latest = list(samples[: len(samples) - held_out]), list(samples[len(samples) - held_out :])
    current = versions.latest(directory)
    old: LengthModel = RegressorModel(current)
    if current is None:
        old = HistogramModel()
        for sample in learned:
            old.observe(sample)
    network = train(learned, plan, should_stop=should_stop, progress=progress)
    new_report = evaluate(RegressorModel(Trained(network, 0, {})), latest)
    verdict = Verdict(None, evaluate(old, latest), old.version, new_report)
    if only_if_better and not verdict.is_better:
        return verdict
    about = {"samples": len(learned), "held_out": {} if new_report is None else new_report.as_dict()}
    path = versions.write(directory, network, about)
    return Verdict(path, verdict.old, verdict.old_version, verdict.new)
