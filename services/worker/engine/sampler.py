"""From logits to tokens. A token depends on its logits, the sampling parameters, the choice and its index.

temperature 0 is argmax. Otherwise: probabilities → top-k → top-p (renormalised in between) → inverse CDF in
token-id order with one uniform number, a counter-based hash of (seed, choice, index): no generator state to
carry to another worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.messages.sequence import Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SamplePoint:
    """One token to choose: the `index`-th of an answer."""

    sampling: Sampling
    choice: int
    index: int


def _mix(value: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    state = _mix((seed + _GOLDEN) & _MASK)
    state = _mix((state ^ choice) + _GOLDEN & _MASK)
    state = _mix((state ^ index) + _GOLDEN & _MASK)
    return (state >> 11) / (1 << 53)


def sample(logits: torch.Tensor, points: Sequence[SamplePoint]) -> list[int | None]:
    """One token per row of `logits` `[rows, vocabulary]`; None for a row whose logits are not finite."""
    logits = logits.float()
    highest, tokens = logits.max(-1)
    drawn = [row for row, point in enumerate(points) if point.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(logits[rows] - highest[rows, None], [points[row] for row in drawn])
    finite = torch.isfinite(highest).tolist()
    return [token if ok else None for token, ok in zip(tokens.tolist(), finite, strict=True)]


def _draw(logits: torch.Tensor, points: Sequence[SamplePoint]) -> torch.Tensor:
    device = logits.device
    temperatures = torch.tensor([point.sampling.temperature for point in points], device=device)
    probabilities = (logits / temperatures.clamp_min(1e-5)[:, None]).softmax(-1)
    top_ks = [point.sampling.top_k for point in points]
    top_ps = [point.sampling.top_p for point in points]
    if any(top_k > 0 for top_k in top_ks) or any(top_p < 1 for top_p in top_ps):
        probabilities = _filter(probabilities, top_ks, top_ps)
    cumulative = probabilities.double().cumsum(-1)
    numbers = [uniform(point.sampling.seed, point.choice, point.index) for point in points]
    total = cumulative[:, -1:]
    target = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _filter(probabilities: torch.Tensor, top_ks: Sequence[int], top_ps: Sequence[float]) -> torch.Tensor:
    """Zero what is outside the top k, then outside the smallest set that reaches top_p of the rest."""
    device = probabilities.device
    vocabulary = probabilities.shape[-1]
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocabulary, device=device)
    kept = [top_k if top_k > 0 else vocabulary for top_k in top_ks]
    ordered = ordered.masked_fill(ranks >= torch.tensor(kept, device=device)[:, None], 0.0)
    before = ordered.cumsum(-1) - ordered
    limit = torch.tensor(top_ps, device=device)[:, None] * ordered.sum(-1, keepdim=True)
    cut = (before >= limit) & (ranks > 0) & (limit < 1)
    return torch.zeros_like(probabilities).scatter(-1, ids, ordered.masked_fill(cut, 0.0))
