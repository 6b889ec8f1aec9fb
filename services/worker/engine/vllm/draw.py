"""Samples a step where its logits are: in this process, or on every rank of a model."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.grammar_masks import RowMasks
from services.worker.engine.native.library import choose
from services.worker.engine.sampler import Logits, sample, take_likeliest, with_hidden
from shared.grammars import Words


class FoundMasks(RowMasks):
    """Masks that are already computed."""

    def __init__(self, rows: Sequence[int], words: Words) -> None:
        self.rows, self.words = rows, words

    def wait(self) -> Words:
        """Return the masks at once."""
        return self.words


class StepDraw:
    """Samples a step. `drawn` has the tokens by request name, and is sent back by another process."""

    def __init__(self, wanted: Sequence[str], points: Sequence[SamplePoint], masks: RowMasks | None) -> None:
        """`wanted`: names of the rows with `points`; `masks`: their grammar masks."""
        self._wanted, self._points, self._masks = wanted, points, masks
        self.drawn: dict[str, Sampled | None] = {}

    def __call__(self, logits: Logits, names: Sequence[str]) -> list[int]:
        """Return a token for each request; `logits` `[requests, vocabulary]` in the order of `names`."""
        if self._wanted:
            at = {name: index for index, name in enumerate(names)}
            found = self._found(logits, [at[name] for name in self._wanted])
            self.drawn = dict(zip(self._wanted, found, strict=True))
        return [self.noted(name) or 0 for name in names]

    def _found(self, logits: Logits, rows: list[int]) -> list[Sampled | None]:
        """Return one token for each of these rows of the logits."""
        library = _library(logits.values.device.type)
        embeds = any(point.sampling.embeds for point in self._points)
        if self._masks is None and not embeds:
            found = take_likeliest(logits.values, rows, self._points, library)
            if found is not None:
                return found
        values, hidden = logits.values, logits.hidden
        if rows != list(range(len(values))):
            values, hidden = values[rows], None if hidden is None else hidden[rows]
        found = sample(Logits(values.float(), hidden=hidden), self._points, library, self._masks)
        return with_hidden(found, self._points, hidden) if embeds else found

    def noted(self, name: str) -> int | None:
        """Return the sampled token of a request, or None."""
        sampled = self.drawn.get(name)
        return None if sampled is None else sampled.token

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only what the other process reads, after waiting for the masks."""
        masks = None if self._masks is None else FoundMasks(self._masks.rows, self._masks.wait())
        return StepDraw, (self._wanted, [_brief(point) for point in self._points], masks)


def _brief(point: SamplePoint) -> SamplePoint:
    """Return a point without its tokens, unless penalties or bad words read them."""
    how = point.sampling
    reads = how.repetition_penalty != 1 or how.frequency_penalty or how.presence_penalty or how.bad_words
    return point if reads else SamplePoint(how, point.choice, point.index)


@cache
def _library(device: str) -> Any:
    return choose("auto", device=torch.device(device), dtype=torch.float32)
