"""Log-probabilities of chosen and likeliest tokens, for the requests that want them. Chooses nothing."""

from collections.abc import Sequence

import torch

from shared.messages.tokens import TokenLogprobs


def measure(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log-softmax of the model's own `logits` `[rows, vocabulary]` fp32, per row.

    At `tokens`, int64 `[rows]`, and at the `tops[row]` likeliest tokens.
    """
    total = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(-1, tokens[:, None]) - total).squeeze(-1).tolist()
    best = logits.topk(min(max(tops), logits.shape[-1]))
    ids, values = best.indices.tolist(), (best.values - total).tolist()
    return [
        TokenLogprobs(chosen[row], tuple(zip(ids[row][:top], values[row][:top], strict=True)))
        for row, top in enumerate(tops)
    ]
