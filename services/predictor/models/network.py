"""The regressor's network: hashed token sequences summed up, a hidden layer, quantiles of the log length.

An ensemble of members, each with embeddings of its own; the prediction is the mean of theirs. A correction
for each quantile, measured on answers that a member had not seen, makes the quantiles hold what they say.
"""

import numpy as np
import torch
from torch import Tensor, nn

from services.predictor.core.distribution import LEVELS, Floats
from services.predictor.core.features import BUCKETS, DENSE, Features

WIDTH = 32
HIDDEN = 64
_LOG_LIMIT = 14.0
"""No length above e^14 ≈ 1.2 million tokens is ever predicted."""


class Member(nn.Module):
    """One network of the ensemble. Its output is the logarithm of the length at `LEVELS`, [prompts,
    len(LEVELS)]."""

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
    """The mean of its members, corrected by quantile: lengths in tokens at `LEVELS`, [prompts, len(LEVELS)].

    They never fall from one level to the next.
    """

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
    """Quantiles in tokens, [prompts, len(LEVELS)]."""
    with torch.inference_mode():
        lengths: Floats = network(*tensors_of(features)).numpy().astype(np.float64)
    return lengths


def tensors_of(features: Features) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `Member.forward` takes them."""
    return (
        torch.from_numpy(features.buckets),
        torch.from_numpy(features.offsets),
        torch.from_numpy(features.weights),
        torch.from_numpy(features.dense),
    )
