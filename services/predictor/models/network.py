"""Network of the regressor: summed embeddings of hashed n-grams, a hidden layer, quantiles of the log length.

An ensemble averages members with separate embeddings. A correction per quantile, measured on answers a member
did not train on, calibrates the quantiles.
"""

import numpy as np
import torch
from torch import Tensor, nn

from services.predictor.core.distribution import LEVELS, Floats
from services.predictor.core.features import BUCKETS, DENSE, Features

WIDTH = 32
HIDDEN = 64
_LOG_LIMIT = 14.0
"""Logarithm of the longest prediction, e^14 ≈ 1.2 million tokens."""


class Member(nn.Module):
    """One network of the ensemble. Returns log lengths at `LEVELS`, [prompts, len(LEVELS)]."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.embeddings = nn.EmbeddingBag(BUCKETS, WIDTH, mode="sum")
        nn.init.normal_(self.embeddings.weight, 0.0, 0.02)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH + DENSE, HIDDEN)
        self.output = nn.Linear(HIDDEN, len(LEVELS))
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
    with torch.inference_mode():
        lengths: Floats = network(*tensors_of(features)).numpy().astype(np.float64)
    return lengths


def tensors_of(features: Features) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the features as the arguments of `Member.forward`."""
    return (
        torch.from_numpy(features.buckets),
        torch.from_numpy(features.offsets),
        torch.from_numpy(features.weights),
        torch.from_numpy(features.dense),
    )
