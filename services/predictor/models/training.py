"""Trains the regressor's network on finished answers with the pinball loss in tokens per quantile.

Each ensemble member leaves out a tenth of the samples to select the best epoch and to calibrate the
quantiles. An answer cut by its limit only raises a quantile, up to the cut. Deterministic for a seed.
Source: `algorithms.md` §2; Koenker and Bassett 1978.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.predictor.core.distribution import LEVELS, HistogramModel
from services.predictor.core.features import Features, features_of
from services.predictor.core.length_model import LengthModel, LengthSample
from services.predictor.core.report import LengthReport, evaluate
from services.predictor.models.regressor import Ensemble, Member, RegressorModel, Trained, latest, write
from shared.errors import InvalidRequest

FOLDS = 10
MIN_SAMPLES = 50
_SCALE_TOKENS = 100.0
_MEDIAN = LEVELS.index(0.5)
_MEDIAN_WEIGHT = 4.0
_CHUNK_FEATURES = 500
_WARM_SHARE = 0.1

Rows = npt.NDArray[np.int64]
TrainingProgress = Callable[[int, int, float], None]
"""Arguments: epochs done, total epochs, MAE in tokens on the left-out samples."""


@dataclass(frozen=True)
class TrainingPlan:
    """Training hyperparameters. The defaults were tuned on the first 10,000 Alpaca prompts."""

    members: int = 5
    epochs: int = 5
    min_steps: int = 300
    """Minimum optimizer steps: few samples get more epochs, up to four times as many."""
    batch: int = 64
    learning_rate: float = 3e-3
    keep_share: float = 0.5
    """Share of each prompt's features kept, redrawn for every batch."""
    seed: int = 0

    def epochs_for(self, samples: int) -> int:
        steps = -(-samples // self.batch)
        return min(4 * self.epochs, max(self.epochs, -(-self.min_steps // steps)))


@dataclass(frozen=True)
class _Data:
    """Samples as arrays: features, number of features, length, and whether it was cut."""

    features: Features
    counts: Rows
    lengths: npt.NDArray[np.float32]
    censored: npt.NDArray[np.bool_]


def train(
    samples: Sequence[LengthSample],
    plan: TrainingPlan | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: TrainingProgress = lambda done, total, mae: None,
) -> Ensemble:
    """Train an ensemble and return the members finished before `should_stop`. Raises InvalidRequest (fewer
    than `MIN_SAMPLES`), TimeoutError (no member was finished)."""
    if len(samples) < MIN_SAMPLES:
        raise InvalidRequest(
            f"{len(samples)} samples; a regressor needs at least {MIN_SAMPLES}", param="data"
        )
    plan, threads = plan or TrainingPlan(), torch.get_num_threads()
    data = _data_of(samples)
    members: list[Member] = []
    residuals: list[npt.NDArray[np.float64]] = []
    fold_of = np.random.default_rng(plan.seed).permutation(len(samples)) % FOLDS
    torch.set_num_threads(1)
    try:
        for number in range(plan.members):
            left_out = np.flatnonzero(fold_of == number % FOLDS)
            member = _train_member(data, left_out, plan, number, should_stop, progress)
            if member is None:
                break
            members.append(member)
            residuals.append(_log_residuals(member, data, left_out))
    finally:
        torch.set_num_threads(threads)
    if not members:
        raise TimeoutError("training was stopped before its first member was done")
    network = Ensemble(len(members))
    network.members = torch.nn.ModuleList(members)
    network.correction.copy_(_correction(np.concatenate(residuals)))
    return network.eval()


def _data_of(samples: Sequence[LengthSample]) -> _Data:
    parts = [
        features_of([sample.prompt for sample in samples[start : start + _CHUNK_FEATURES]])
        for start in range(0, len(samples), _CHUNK_FEATURES)
    ]
    counts = np.concatenate([np.diff(np.append(part.offsets, len(part.buckets))) for part in parts])
    features = Features(
        np.concatenate([part.buckets for part in parts]),
        np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        np.concatenate([part.weights for part in parts]),
        np.concatenate([part.dense for part in parts]),
    )
    return _Data(
        features,
        counts.astype(np.int64),
        np.array([max(1, sample.output_tokens) for sample in samples], dtype=np.float32),
        np.array([sample.censored for sample in samples]),
    )


def _batch_of(
    data: _Data, rows: Rows, keep: Callable[[int], npt.NDArray[np.bool_]] | None
) -> tuple[Tensor, ...]:
    """Return rows as the arguments of `Member.forward`; with `keep`, with a random part of their features."""
    counts = data.counts[rows]
    owners = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.repeat(data.features.offsets[rows], counts) + within
    weights = data.features.weights[places]
    if keep is not None:
        kept = keep(len(places))
        places, owners, weights = places[kept], owners[kept], weights[kept]
        weights = weights * np.float32(np.sqrt(len(kept) / max(1, int(kept.sum()))))
    offsets = np.searchsorted(owners, np.arange(len(rows)))
    buckets = data.features.buckets[places]
    dense = data.features.dense[rows]
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in (buckets, offsets, weights, dense))


def _train_member(
    data: _Data,
    left_out: Rows,
    plan: TrainingPlan,
    number: int,
    should_stop: Callable[[], bool],
    progress: TrainingProgress,
) -> Member | None:
    """Train one member on all rows but `left_out`. Returns None if it was stopped."""
    kept = np.setdiff1d(np.arange(len(data.lengths)), left_out)
    torch.manual_seed(plan.seed * 1000 + number)
    rng = np.random.default_rng((plan.seed, number))
    member = Member()
    _start_from_quantiles(member, data.lengths[kept])
    epochs = plan.epochs_for(len(data.lengths))
    optimizer = torch.optim.AdamW(member.parameters(), lr=plan.learning_rate, weight_decay=1e-3)
    steps = epochs * -(-len(kept) // plan.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace(step / steps))
    best, best_mae = member.state_dict(), math.inf
    for epoch in range(epochs):
        member.train()
        order = rng.permutation(kept)
        for start in range(0, len(order), plan.batch):
            if should_stop():
                return None
            rows = order[start : start + plan.batch]
            logs = member(*_batch_of(data, rows, lambda size: rng.random(size) < plan.keep_share))
            loss = _pinball(logs, data, rows)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        mae = _mae(member, data, left_out)
        progress(number * epochs + epoch + 1, plan.members * epochs, mae)
        if mae < best_mae:
            best, best_mae = copy.deepcopy(member.state_dict()), mae
    member.load_state_dict(best)
    return member.eval()


def _pace(done: float) -> float:
    """Return the learning-rate factor: a warm-up over the first tenth, then a cosine to 0."""
    if done < _WARM_SHARE:
        return (done + 0.01) / (_WARM_SHARE + 0.01)
    return 0.5 * (1 + math.cos(math.pi * (done - _WARM_SHARE) / (1 - _WARM_SHARE)))


def _start_from_quantiles(member: Member, lengths: npt.NDArray[np.float32]) -> None:
    """Set the output bias to the quantiles of all lengths, as the first prediction."""
    with torch.no_grad():
        logs = np.log(np.quantile(lengths, LEVELS))
        member.output.bias.copy_(torch.from_numpy(logs.astype(np.float32)))
        member.output.weight.mul_(0.1)


def _pinball(logs: Tensor, data: _Data, rows: Rows) -> Tensor:
    levels = torch.tensor(LEVELS)
    missing = (torch.from_numpy(data.lengths[rows])[:, None] - logs.exp()) / _SCALE_TOKENS
    is_whole = torch.from_numpy(~data.censored[rows])[:, None]
    too_long = (levels - 1.0) * missing * is_whole
    weights = torch.ones(len(LEVELS))
    weights[_MEDIAN] = _MEDIAN_WEIGHT
    return (torch.maximum(levels * missing, too_long) * weights).mean()


def _logs(member: Member, data: _Data, rows: Rows) -> npt.NDArray[np.float64]:
    member.eval()
    chunks = [rows[start : start + _CHUNK_FEATURES] for start in range(0, len(rows), _CHUNK_FEATURES)]
    with torch.inference_mode():
        parts = [member(*_batch_of(data, chunk, None)).numpy() for chunk in chunks]
    return np.concatenate([np.zeros((0, len(LEVELS))), *parts])


def _mae(member: Member, data: _Data, rows: Rows) -> float:
    """Return the MAE of the median over complete answers, or over all if none is complete."""
    whole = rows[~data.censored[rows]] if not data.censored[rows].all() else rows
    median = np.exp(_logs(member, data, whole)[:, _MEDIAN])
    return float(np.abs(median - data.lengths[whole]).mean())


def _log_residuals(member: Member, data: _Data, rows: Rows) -> npt.NDArray[np.float64]:
    """Return log(length / quantile) of complete answers, [answers, len(LEVELS)]."""
    whole = rows[~data.censored[rows]]
    logs = np.maximum.accumulate(_logs(member, data, whole), axis=1)
    residuals: npt.NDArray[np.float64] = np.log(data.lengths[whole])[:, None] - logs
    return residuals


def _correction(residuals: npt.NDArray[np.float64]) -> Tensor:
    """Return what to add to the log quantiles so that they hold. The median is 0: it is trained most."""
    shift = np.zeros(len(LEVELS), dtype=np.float32)
    if len(residuals) >= MIN_SAMPLES:
        for index, level in enumerate(LEVELS):
            if index != _MEDIAN:
                shift[index] = np.quantile(residuals[:, index], level)
    return torch.from_numpy(shift)


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
    learned, judges = samples[: len(samples) - held_out], samples[len(samples) - held_out :]
    current = latest(directory)
    old: LengthModel = RegressorModel(current)
    if current is None:
        old = HistogramModel()
        for sample in learned:
            old.observe(sample)
    network = train(learned, plan, should_stop=should_stop, progress=progress)
    new_report = evaluate(RegressorModel(Trained(network, 0, {})), judges)
    verdict = Verdict(None, evaluate(old, judges), old.version, new_report)
    if only_if_better and not verdict.is_better:
        return verdict
    about = {"samples": len(learned), "held_out": {} if new_report is None else new_report.as_dict()}
    return replace(verdict, path=write(directory, network, about))
