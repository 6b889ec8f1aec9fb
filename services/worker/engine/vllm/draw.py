"""Samples a step where its logits are: in this process, or on every rank of a model."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from services.worker.core.sampling import SamplePoint
from services.worker.engine.grammar_masks import RowMasks
from services.worker.engine.native.library import choose
from services.worker.engine.paged import to_device
from services.worker.engine.sampler import Chosen, Logits, choose_tokens, take_likeliest
from shared.grammars import Words


class FoundMasks(RowMasks):
    """Masks that are already computed."""

    def __init__(self, rows: Sequence[int], words: Words) -> None:
        self.rows, self.words = rows, words

    def wait(self) -> Words:
        """Return the masks at once."""
        return self.words


class StepDraw:
    """Samples a step, whose tokens stay on the device. Another process sends `chosen` and `hidden` back."""

    def __init__(
        self, wanted: Sequence[str], points: Sequence[SamplePoint], masks: RowMasks | None = None
    ) -> None:
        """`wanted`: names of the requests with `points`; `masks`: their grammar masks."""
        self._wanted, self._points, self.masks = wanted, points, masks
        self.embeds = any(point.sampling.embeds for point in points)
        self.chosen: Chosen | None = None
        """The sampled tokens, in the order of `wanted`."""
        self.hidden: torch.Tensor | None = None
        """`Logits.hidden` in the same order, if a point embeds."""

    def __call__(self, logits: Logits, names: Sequence[str]) -> torch.Tensor:
        """Return the requests' tokens, int64 `[requests]` on the device; 0 where none is wanted.

        `logits` `[requests, vocabulary]` in the order of `names`."""
        at = {name: index for index, name in enumerate(names)}
        rows: Sequence[int] = [at[name] for name in self._wanted]
        are_all = rows == [*range(len(names))]
        if are_all:
            rows = range(len(names))
        values, hidden, device = logits.values, logits.hidden, logits.values.device
        library = _library(device.type)
        chosen = None
        if self.masks is None and not self.embeds:
            chosen = take_likeliest(values, rows, self._points, library)
        places = to_device(torch.tensor(rows, dtype=torch.int64), device)
        if chosen is None:
            if not are_all:
                values, hidden = values[places], None if hidden is None else hidden[places]
            chosen = choose_tokens(Logits(values), self._points, library, self.masks)
        self.chosen, self.hidden = chosen, hidden
        if are_all:
            return chosen.tokens
        tokens = torch.zeros(len(names), dtype=torch.int64, device=device)
        return tokens.index_copy_(0, places, chosen.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only what the other process reads, after waiting for the masks."""
        masks = None if self.masks is None else FoundMasks(self.masks.rows, self.masks.wait())
        return StepDraw, (self._wanted, [_brief(point) for point in self._points], masks)


def _brief(point: SamplePoint) -> SamplePoint:
    """Return a point without its tokens, unless penalties or bad words read them."""
    how = point.sampling
    reads = how.repetition_penalty != 1 or how.frequency_penalty or how.presence_penalty or how.bad_words
    return point if reads else SamplePoint(how, point.choice, point.index)


@cache
def _library(device: str) -> Any:
    return choose("auto", device=torch.device(device), dtype=torch.float32)
