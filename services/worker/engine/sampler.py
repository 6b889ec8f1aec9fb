"""Sampler: turns logits into tokens, from the sampling parameters, the choice and the token's index.

The order is vLLM's: log-probabilities of the raw logits, penalties and `min_tokens`, grammar mask, then
argmax at temperature 0 or a draw (`drawing.py`). The repetition penalty is CTRL's (Keskar et al. 2019,
§4.1), by sign as in transformers; frequency and presence penalties are OpenAI's. On the CPU, C++ (`draw.h`)
masks and finds the argmax."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.core.decodes import DecodeBatch, Int64s
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.drawing import draw, draw_natively, wish_of
from services.worker.engine.native.library import NativeDraw
from services.worker.engine.paged import to_device
from shared.errors import InternalError
from shared.grammars import Words
from shared.messages.tokens import TokenLogprobs

if TYPE_CHECKING:
    from services.worker.engine.grammar_masks import RowMasks

_LARGEST, _INFINITY = torch.finfo(torch.float32).max, float("inf")


@dataclass(frozen=True, slots=True)
class Logits:
    """Output of a forward pass: `values` `[rows, vocabulary]`. Valid until the next pass.

    If the pass computes them: `highest` `[rows]`, each row's maximum (NaN if any value is NaN), and
    `likeliest`, int64 `[rows]`, the first token that has it. The sampler may change all three."""

    values: torch.Tensor
    highest: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    """`[rows, hidden size]`: input of the model's head, after its last norm."""


def is_steered(point: SamplePoint) -> bool:
    """Return whether `penalize` may change the point's logits."""
    how = point.sampling
    return bool(
        how.repetition_penalty != 1
        or (point.index > 0 and (how.frequency_penalty != 0 or how.presence_penalty != 0))
        or point.index < how.min_tokens
        or how.logit_bias
        or how.allowed_token_ids
        or how.bad_words
    )


def penalize(logits: torch.Tensor, points: Sequence[SamplePoint]) -> None:
    """Apply biases, repetition, frequency and presence penalties, then token masks, in place.

    `logits` `[rows, vocabulary]` fp32. Biases and penalties leave values that are not finite unchanged."""
    vocabulary = logits.shape[-1]
    biased = [row for row, point in enumerate(points) if point.sampling.logit_bias]
    if biased:
        biases = [points[row].sampling.logit_bias for row in biased]
        row, token = _occurrences(biased, [[token for token, _ in bias] for bias in biases], logits.device)
        added = _floats([value for bias in biases for _, value in bias], logits)
        _write(logits, row, token, logits[row, token] + added)
    repeated = [row for row, point in enumerate(points) if point.sampling.repetition_penalty != 1]
    if repeated:  # A repeated token is written several times with the same value.
        row, token = _occurrences(repeated, [points[row].tokens for row in repeated], logits.device)
        penalty = _floats([point.sampling.repetition_penalty for point in points], logits)[row]
        before = logits[row, token]
        _write(logits, row, token, torch.where(before > 0, before / penalty, before * penalty))
    frequencies = [point.sampling.frequency_penalty for point in points]
    presences = [point.sampling.presence_penalty for point in points]
    counted = [
        row for row, point in enumerate(points) if point.index > 0 and (frequencies[row] or presences[row])
    ]
    if counted:
        answers = [points[row].tokens[-points[row].index :] for row in counted]
        row, token = _occurrences(counted, answers, logits.device)
        places, counts = torch.unique(row * vocabulary + token, return_counts=True)
        row, token = places // vocabulary, places % vocabulary
        lost = _floats(frequencies, logits)[row] * counts + _floats(presences, logits)[row]
        _write(logits, row, token, logits[row, token] - lost)
    short = [row for row, point in enumerate(points) if point.index < point.sampling.min_tokens]
    if short:
        ends = [[end for end in points[row].sampling.end_token_ids if 0 <= end < vocabulary] for row in short]
        row, token = _occurrences(short, ends, logits.device)
        before = logits[row, token]
        logits[row, token] = torch.where(before < _INFINITY, -_INFINITY, before)
    for at, point in enumerate(points):
        if point.sampling.allowed_token_ids or point.sampling.bad_words:
            _mask_tokens(logits[at], point)


def _mask_tokens(logits: torch.Tensor, point: SamplePoint) -> None:
    """Mask the tokens of one row `[vocabulary]` that are not allowed or would complete a bad word."""
    if point.sampling.allowed_token_ids:
        kept = torch.tensor(point.sampling.allowed_token_ids, device=logits.device)
        values = logits[kept]
        logits.fill_(-_INFINITY)
        logits[kept] = values
    answer = point.tokens[len(point.tokens) - max(point.index, 0) :]
    for word in filter(None, point.sampling.bad_words):
        *before, last = word
        if not before or list(answer[-len(before) :]) == before:
            logits[last] = -_INFINITY


def _occurrences(
    rows: Sequence[int], texts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and token id of each token in `texts`, int64 `[all tokens]`; text `i` is of `rows[i]`."""
    row = torch.repeat_interleave(_int64(rows), _int64(len(text) for text in texts))
    return to_device(row, device), to_device(_int64(chain.from_iterable(texts)), device)


def _int64(numbers: Iterable[int]) -> torch.Tensor:
    """Return the numbers as int64; `array` reads Python integers several times faster than `torch.tensor`."""
    packed = array("q", numbers)
    return torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0, dtype=torch.int64)


def _floats(values: Sequence[float], logits: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.float32), logits.device)


def _write(logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor, after: torch.Tensor) -> None:
    before, after = logits[row, token], after.clamp(-_LARGEST, _LARGEST)
    logits[row, token] = torch.where(before.isfinite(), after, before)


def mask_rows(logits: torch.Tensor, rows: Sequence[int], words: Words, library: CDLL | None = None) -> None:
    """Set the logits of tokens whose bit in `words` is 0 to −inf, in place.

    `logits` `[all rows, vocabulary]` fp32, `words` `[len(rows), words]` uint32."""
    if library is not None and logits.is_contiguous():
        at = np.array(rows, dtype=np.int64)
        library.mask_logits(
            logits.data_ptr(), logits.shape[1], at.ctypes.data, words.ctypes.data, len(rows), words.shape[1]
        )
        return
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    at_rows = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    logits[at_rows] = logits[at_rows].masked_fill(torch.from_numpy(bits == 0).to(logits.device), -_INFINITY)


def likeliest(
    logits: torch.Tensor, library: CDLL | None, rows: Sequence[int], words: Words | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logit of each of `rows`, fp32, and the first token id that has it, int64.

    `logits` `[all rows, vocabulary]` fp32. Only tokens whose bit is set in `words` `[len(rows), words]`
    count: −inf if none is, NaN if any of them is NaN. Without `library`, `words` mask `logits` in place."""
    if library is None or not logits.is_contiguous():
        if words is not None:
            mask_rows(logits, rows, words)
        if rows != range(len(logits)):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        highest, tokens = logits.max(-1)
        return highest, tokens
    at = np.array(rows, dtype=np.int64)
    tokens, highest = torch.empty(len(rows), dtype=torch.int64), torch.empty(len(rows))
    mask, width = (None, 0) if words is None else (words.ctypes.data, words.shape[1])
    given = logits.data_ptr(), logits.shape[1], at.ctypes.data, mask, len(rows), width
    library.find_likeliest(*given, tokens.data_ptr(), highest.data_ptr())
    return highest, tokens


def measure(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return log-probabilities of raw `logits` `[rows, vocabulary]` fp32, one entry per row.

    Each holds that of `tokens[row]`, int64, and those of the `tops[row]` likeliest tokens."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(-1, tokens[:, None]) - total).squeeze(-1).tolist()
    best = logits.topk(min(max(tops), logits.shape[-1]))
    ids, values = best.indices.tolist(), (best.values - total).tolist()
    return [
        TokenLogprobs(chosen[row], tuple(zip(ids[row][:top], values[row][:top], strict=True)))
        for row, top in enumerate(tops)
    ]


def sample(
    found: Logits, points: Sequence[SamplePoint], library: CDLL | None = None, masks: "RowMasks | None" = None
) -> list[Sampled | None]:
    """Return one token per row; None if the row's highest logit is not finite.

    Changes `found` in place. `library`: the native library, for logits on the CPU."""
    return choose_tokens(found, points, library, masks).answers()


def choose_tokens(
    found: Logits, points: Sequence[SamplePoint], library: CDLL | None = None, masks: "RowMasks | None" = None
) -> "Chosen":
    """`sample` without waiting for the device, where the parameters allow it."""
    logits, steered = found.values.float(), False
    tops: dict[int, int] = {}
    drawn: list[int] = []
    wishes: list[NativeDraw] = []
    forced: list[int] = []
    for row, point in enumerate(points):
        steered = steered or is_steered(point)
        if point.sampling.top_logprobs is not None:
            tops[row] = point.sampling.top_logprobs
        if point.index < 0:
            forced.append(row)
        elif point.sampling.temperature > 0:
            drawn.append(row)
            wishes += [wish_of(row, point)] if library is not None else []
    measured = list(tops)
    raw = logits[to_device(_int64(measured), logits.device)] if tops else logits[:0]
    if steered:
        penalize(logits, points)
    masked = () if masks is None else (masks.rows, masks.wait())
    highest, tokens = found.highest, found.likeliest
    if masked and (drawn or steered or highest is None):
        mask_rows(logits, *masked, library)
    if highest is None or tokens is None or steered:
        highest, tokens = likeliest(logits, library, range(len(points)))
    elif masked:
        highest[masked[0]], tokens[masked[0]] = likeliest(logits, library, *masked)
    if drawn and library is not None:
        tokens[drawn] = torch.tensor(draw_natively(library, logits.contiguous(), highest, wishes))
    elif drawn:
        rows = to_device(torch.tensor(drawn), logits.device)
        tokens[rows] = draw(logits[rows] - highest[rows, None], [points[row] for row in drawn])
    for row in forced:
        tokens[row] = points[row].forced or 0
    return Chosen(tokens, highest, raw, tops)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Sampled tokens on their device."""

    tokens: torch.Tensor
    """int64 `[rows]`."""
    highest: torch.Tensor
    raw: torch.Tensor
    """Raw logits of the rows in `tops`."""
    tops: Mapping[int, int]
    """Number of log-probabilities by row."""

    def told(self) -> torch.Tensor:
        """Return the tokens and whether each is one, int64 `[2, rows]`."""
        return torch.stack([self.tokens, self.highest.isfinite().to(self.tokens.dtype)])

    def told_here(self) -> Int64s:
        """The same on the host, of tokens that are there."""
        told = np.empty((2, len(self.tokens)), np.int64)
        told[0] = self.tokens.numpy()
        np.isfinite(self.highest.float().numpy(), out=told[1], casting="unsafe")
        return told

    def answers(self, told: Int64s | None = None, first: int = 0) -> list[Sampled | None]:
        """Wait for the tokens from row `first` on. `told`: a copy of what that method returns."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.tops:
            found = measure(self.raw, self.tokens[list(self.tops)], list(self.tops.values()))
            logprobs = dict(zip(self.tops, found, strict=True))
        each = (self.told() if told is None else told)[:, first:].tolist()
        rows = enumerate(zip(*each, strict=True), first)
        return [Sampled(token, logprobs.get(row)) if is_finite else None for row, (token, is_finite) in rows]


def take_likeliest(
    logits: torch.Tensor, rows: Sequence[int], points: Sequence[SamplePoint], library: CDLL | None = None
) -> "Chosen | None":
    """Sample `rows` of `logits` `[all rows, vocabulary]` greedily without copying them.

    Return None if any of `points` needs more than the likeliest token."""
    for point in points:
        how = point.sampling
        if how.temperature > 0 or how.top_logprobs is not None or point.index < 0 or is_steered(point):
            return None
    highest, tokens = likeliest(logits.float(), library, rows)
    return Chosen(tokens, highest, logits[:0], {})


def are_likeliest(batch: DecodeBatch) -> bool:
    """Return whether each token of a batch is the likeliest one, whatever came before."""
    group = batch.group
    if group.engine_note is None:
        points = [SamplePoint(each, 0, max(1, each.min_tokens)) for each in group.samplings]
        needs_more = (
            is_steered(each) or each.sampling.grammar or each.sampling.temperature for each in points
        )
        group.engine_note = not any(needs_more), max(each.min_tokens for each in group.samplings)
    are_plain, least = group.engine_note
    return are_plain and (not least or bool((batch.first + 1 - group.prompts).min() >= least))


def choose_likeliest(
    found: Logits,
    rows: int,
    points: Sequence[SamplePoint],
    library: CDLL | None,
    masks: "RowMasks | None" = None,
) -> "Chosen":
    """Choose the likeliest token for the first `rows`, and `choose_tokens` for the points after them."""
    highest, tokens = found.highest, found.likeliest
    if highest is None or tokens is None:
        highest, tokens = likeliest(found.values.float(), library, range(len(found.values)))
    first = Chosen(tokens[:rows], highest[:rows], found.values[:0], {})
    if not points:
        return first
    others = Logits(found.values[rows:], highest[rows:], tokens[rows:])
    rest = choose_tokens(others, points, library, masks)
    tops = {rows + row: top for row, top in rest.tops.items()}
    chosen = torch.cat((first.tokens, rest.tokens))
    return Chosen(chosen, torch.cat((first.highest, rest.highest)), rest.raw, tops)


def with_hidden(
    drawn: Sequence[Sampled | None], points: Sequence[SamplePoint], hidden: torch.Tensor | None
) -> list[Sampled | None]:
    """Return `drawn` with each embedding row's `hidden` `[rows, hidden size]` attached as fp32 bytes.

    None for a row that is not finite. Raises InternalError without `hidden`."""
    if hidden is None:
        raise InternalError("this way of computing the model keeps no hidden states")
    found = list(drawn)
    for row, (sampled, point) in enumerate(zip(drawn, points, strict=True)):
        if sampled is not None and sampled.logprobs is not None and point.sampling.embeds:
            values, measured, found[row] = hidden[row].float().cpu(), sampled.logprobs, None
            if bool(values.isfinite().all()):
                packed = values.numpy().astype("<f4").tobytes()
                found[row] = Sampled(sampled.token, TokenLogprobs(measured.chosen, measured.top, packed))
    return found
