"""Adds hidden states to the sampled tokens of embedding requests."""

from collections.abc import Sequence

import torch

from services.worker.core.sampling import Sampled, SamplePoint
from shared.errors import InternalError
from shared.messages.tokens import TokenLogprobs


def with_hidden(
    drawn: Sequence[Sampled | None], points: Sequence[SamplePoint], hidden: torch.Tensor | None
) -> list[Sampled | None]:
    """Return `drawn` with each embedding row's `hidden` `[rows, hidden size]` attached as fp32 bytes.

    None for a row that is not finite. Raises InternalError without `hidden`.
    """
    if hidden is None:
        raise InternalError("this way of computing the model keeps no hidden states")
    found = list(drawn)
    for row, (sampled, point) in enumerate(zip(drawn, points, strict=True)):
        if sampled is None or sampled.logprobs is None or not point.sampling.embeds:
            continue
        values = hidden[row].float().cpu()
        packed = values.numpy().astype("<f4").tobytes() if bool(values.isfinite().all()) else None
        found[row] = None if packed is None else _with(sampled, packed)
    return found


def _with(sampled: Sampled, packed: bytes) -> Sampled:
    measured = sampled.logprobs or TokenLogprobs(0.0)
    return Sampled(sampled.token, TokenLogprobs(measured.chosen, measured.top, packed))
