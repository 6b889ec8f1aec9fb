"""`regressor`: a small network on token ids that predicts quantiles of the length, and its versions on disk.

Until a version is trained, a histogram answers and learns from every finished answer. `adopt` replaces the
version between two calls; `learning.py` decides when. Uses one thread: 32 prompts take a few milliseconds.
Trained versions are numbered files, written atomically; readers take the newest intact one. Source:
papers/003 §2.3, `algorithms.md` §2.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from services.predictor.core.distribution import LEVELS, Floats, HistogramModel, predict_from
from services.predictor.core.features import BUCKETS, DENSE, HEAD_GRAMS, LONGEST_GRAM, Features, features_of
from services.predictor.core.length_model import LengthQuery, LengthSample, ModelSettings, PredictedLength
from services.predictor.core.report import predict_all
from services.predictor.samples import write_whole
from shared.errors import ConfigError

_WIDTH = 32
_HIDDEN = 64
_LAYOUT = f"{BUCKETS}/{LONGEST_GRAM}/{HEAD_GRAMS}/{DENSE}/{_WIDTH}/{_HIDDEN}"
"""Layout of features and network; a file with another one cannot be loaded."""
_LOG_LIMIT = 14.0
"""Logarithm of the longest prediction, e^14 ≈ 1.2 million tokens."""


class Member(nn.Module):
    """One network of the ensemble. Returns log lengths at `LEVELS`, [prompts, len(LEVELS)]."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.embeddings = nn.EmbeddingBag(BUCKETS, _WIDTH, mode="sum")
        nn.init.normal_(self.embeddings.weight, 0.0, 0.02)
        self.norm = nn.LayerNorm(_WIDTH)
        self.hidden = nn.Linear(_WIDTH + DENSE, _HIDDEN)
        self.output = nn.Linear(_HIDDEN, len(LEVELS))
        self.dropout = nn.Dropout(dropout)

    def forward(self, buckets: Tensor, offsets: Tensor, weights: Tensor, dense: Tensor) -> Tensor:
        summed = self.norm(self.embeddings(buckets, offsets, per_sample_weights=weights))
        hidden = torch.relu(self.hidden(self.dropout(torch.cat([summed, dense], dim=1))))
        logs: Tensor = self.output(self.dropout(hidden))
        return logs.clamp(0.0, _LOG_LIMIT)


class Ensemble(nn.Module):
    """Corrected mean of the members: lengths in tokens at `LEVELS`, [prompts, len(LEVELS)], ascending."""

    correction: Tensor

    def __init__(self, members: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(Member() for _ in range(members))
        self.register_buffer("correction", torch.zeros(len(LEVELS)))

    def forward(self, buckets: Tensor, offsets: Tensor, weights: Tensor, dense: Tensor) -> Tensor:
        lengths = [member(buckets, offsets, weights, dense).exp() for member in self.members]
        corrected = torch.stack(lengths).mean(dim=0) * self.correction.exp()
        return torch.cummax(corrected, dim=1).values


def lengths_of(network: Ensemble, features: Features) -> Floats:
    """Return quantiles in tokens, [prompts, len(LEVELS)]."""
    parts = (features.buckets, features.offsets, features.weights, features.dense)
    with torch.inference_mode():
        lengths: Floats = network(*map(torch.from_numpy, parts)).numpy().astype(np.float64)
    return lengths


@dataclass(frozen=True)
class Trained:
    """A trained network, its number, and its accuracy when it was made."""

    network: Ensemble
    number: int
    report: Mapping[str, Any]

    @property
    def version(self) -> str:
        return f"regressor-{self.number}"


def paths(directory: Path) -> list[Path]:
    """Return the files of all versions in a directory, newest last."""
    return sorted(directory.glob("regressor-??????.safetensors"))


def number_of(path: Path) -> int:
    return int(path.stem.removeprefix("regressor-"))


def write(directory: Path, network: Ensemble, report: Mapping[str, Any], *, keep: int = 5) -> Path:
    """Write the next version and remove all but the last `keep`. Returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    there = paths(directory)
    path = directory / f"regressor-{number_of(there[-1]) + 1 if there else 1:06}.safetensors"
    about = {"layout": _LAYOUT, "members": str(len(network.members)), "report": json.dumps(dict(report))}
    data = save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, about)
    write_whole(path, data)
    for old in paths(directory)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def read(path: Path) -> Trained:
    """Load a version. Raises ConfigError if it is damaged or of another layout."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}; train anew", param="model") from error
    if about.get("layout") != _LAYOUT:
        raise ConfigError(f"{path.name} was made by another release; train anew", param="model")
    network = Ensemble(int(about["members"]))
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"{path.name} is incomplete; train anew", param="model") from error
    return Trained(network.eval(), number_of(path), json.loads(about["report"]))


def latest(directory: Path) -> Trained | None:
    """Return the newest version that can be read, or None."""
    for path in reversed(paths(directory)):
        try:
            return read(path)
        except ConfigError:
            continue
    return None


class RegressorModel:
    """Predicts with the trained version, or with a histogram while there is none."""

    name = "regressor"

    def __init__(self, trained: Trained | None = None) -> None:
        self.trained = trained
        self._histogram = HistogramModel()

    @classmethod
    def from_settings(cls, settings: ModelSettings) -> "RegressorModel":
        """Load the latest version in `state_dir`. Limits torch to one thread from here on."""
        torch.set_num_threads(1)
        return cls(None if settings.state_dir is None else latest(settings.state_dir))

    @property
    def version(self) -> str:
        return self._histogram.version if self.trained is None else self.trained.version

    def adopt(self, trained: Trained) -> None:
        """Use this version from the next call on."""
        self.trained = trained

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        return self.predict_batch([LengthQuery(prompt, max_tokens, generated_tokens)])[0]

    def predict_batch(self, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
        """Return one prediction per query, in one call of the network."""
        trained = self.trained
        if trained is None:
            return predict_all(self._histogram, queries)
        if not queries:
            return []
        lengths = lengths_of(trained.network, features_of([query.prompt for query in queries]))
        return predict_from(lengths, queries)

    def observe(self, sample: LengthSample) -> None:
        """Update the histogram; the network learns in training only."""
        self._histogram.observe(sample)
