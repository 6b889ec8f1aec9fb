"""What a forward pass hands to the sampler."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Logits:
    """`values` `[rows, vocabulary]`: the sampler's to change, and valid until the next pass.

    Where the pass found them on its way: `highest` `[rows]` of each row (NaN if any value is), and
    `likeliest`, int64 `[rows]`, the first token that has it.
    """

    values: torch.Tensor
    highest: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    """`[rows, hidden size]`: what `values` are of, after the model's last norm; valid as long as they are."""
