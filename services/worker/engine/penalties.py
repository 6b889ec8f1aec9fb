"""Logits changed by what a text already holds: penalties, and no end before `min_tokens`.

Only the tokens that occur are read and written, so the cost follows the length of the texts that ask for it
and not the vocabulary. The repetition penalty is CTRL's (Keskar et al. 2019, §4.1) by sign, as
transformers has it; frequency and presence penalties are OpenAI's. Knows no temperature and draws nothing.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from services.worker.core.sampling import SamplePoint

_LARGEST = torch.finfo(torch.float32).max
_INFINITY = float("inf")


def penalize(logits: torch.Tensor, points: Sequence[SamplePoint]) -> None:
    """Repetition, then frequency and presence penalty, then ends masked; in place, `[rows, vocabulary]` fp32.

    A logit that is not finite stays as it is.
    """
    repeated = [row for row, point in enumerate(points) if point.sampling.repetition_penalty != 1]
    if repeated:
        _penalize_repetition(logits, points, repeated)
    counted = [row for row, point in enumerate(points) if point.index and _is_counted(point)]
    if counted:
        _penalize_counts(logits, points, counted)
    short = [row for row, point in enumerate(points) if point.index < point.sampling.min_tokens]
    if short:
        _mask_ends(logits, points, short)


def _is_counted(point: SamplePoint) -> bool:
    return point.sampling.frequency_penalty != 0 or point.sampling.presence_penalty != 0


def _penalize_repetition(logits: torch.Tensor, points: Sequence[SamplePoint], rows: Sequence[int]) -> None:
    """A token that occurs twice is written twice, with the same value."""
    row, token = _occurrences(rows, [points[row].tokens for row in rows], logits.device)
    penalty = _by_row([point.sampling.repetition_penalty for point in points], logits)[row]
    before = logits[row, token]
    _write(logits, row, token, before, torch.where(before > 0, before / penalty, before * penalty))


def _penalize_counts(logits: torch.Tensor, points: Sequence[SamplePoint], rows: Sequence[int]) -> None:
    vocabulary = logits.shape[-1]
    answers = [points[row].tokens[-points[row].index :] for row in rows]
    row, token = _occurrences(rows, answers, logits.device)
    places, counts = torch.unique(row * vocabulary + token, return_counts=True)
    row, token = places // vocabulary, places % vocabulary
    frequency = _by_row([point.sampling.frequency_penalty for point in points], logits)[row]
    presence = _by_row([point.sampling.presence_penalty for point in points], logits)[row]
    before = logits[row, token]
    _write(logits, row, token, before, before - (frequency * counts + presence))


def _mask_ends(logits: torch.Tensor, points: Sequence[SamplePoint], rows: Sequence[int]) -> None:
    vocabulary = logits.shape[-1]
    ends = [[end for end in points[row].sampling.end_token_ids if 0 <= end < vocabulary] for row in rows]
    row, token = _occurrences(rows, ends, logits.device)
    before = logits[row, token]
    logits[row, token] = torch.where(before < _INFINITY, -_INFINITY, before)


def _occurrences(
    rows: Sequence[int], texts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token of everything in `texts`, int64 `[all tokens]` each; text `i` belongs to `rows[i]`."""
    row = torch.repeat_interleave(_int64(rows), _int64(len(text) for text in texts))
    return row.to(device), _int64(chain.from_iterable(texts)).to(device)


def _int64(numbers: Iterable[int]) -> torch.Tensor:
    """Through an array, which reads Python's integers several times faster than `torch.tensor`."""
    packed = array("q", numbers)
    return torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0, dtype=torch.int64)


def _by_row(values: Sequence[float], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=logits.device)


def _write(
    logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor, before: torch.Tensor, after: torch.Tensor
) -> None:
    after = after.clamp(-_LARGEST, _LARGEST)
    logits[row, token] = torch.where(before.isfinite(), after, before)
