"""Output of a forward pass for the sampler."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits `values` `[rows, vocabulary]`; the sampler may change them. Valid until the next pass.

    If the pass computes them: `highest` `[rows]`, each row's maximum (NaN if any value is NaN), and
    `likeliest`, int64 `[rows]`, the first token that has it.
    """

    values: torch.Tensor
    highest: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    """`[rows, hidden size]`: input of the model's head, after its last norm; valid as long as `values`."""
