"""Sampler: turns logits into tokens, from the sampling parameters, the choice and the token's index.

The order is vLLM's: log-probabilities of the raw logits, penalties and `min_tokens`, grammar mask, then
argmax at temperature 0 or a draw (`drawing.py`). Penalties touch only tokens that occur in the text, so
their cost does not depend on the vocabulary. The repetition penalty is CTRL's (Keskar et al. 2019, §4.1), by
sign as in transformers; frequency and presence penalties are OpenAI's. On the CPU masking, argmax and
drawing run in C++ (`draw.h`) if the library is built.
"""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from ctypes import CDLL
from itertools import chain

import numpy as np
import torch

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.drawing import draw, draw_natively, wish_of
from services.worker.engine.grammar_masks import RowMasks
from services.worker.engine.logits import Logits
from services.worker.engine.native.library import declare
from shared.grammars import Words
from shared.messages.tokens import TokenLogprobs

_LARGEST = torch.finfo(torch.float32).max
_INFINITY = float("inf")


def penalize(logits: torch.Tensor, points: Sequence[SamplePoint]) -> None:
    """Apply biases, repetition, frequency and presence penalties, then token masks, in place.

    `logits` `[rows, vocabulary]` fp32. Biases and penalties leave values that are not finite unchanged.
    """
    biased = [row for row, point in enumerate(points) if point.sampling.logit_bias]
    if biased:
        _add_biases(logits, points, biased)
    repeated = [row for row, point in enumerate(points) if point.sampling.repetition_penalty != 1]
    if repeated:
        _penalize_repetition(logits, points, repeated)
    counted = [row for row, point in enumerate(points) if point.index > 0 and _is_counted(point)]
    if counted:
        _penalize_counts(logits, points, counted)
    short = [row for row, point in enumerate(points) if point.index < point.sampling.min_tokens]
    if short:
        _mask_ends(logits, points, short)
    for row, point in enumerate(points):
        if point.sampling.allowed_token_ids or point.sampling.bad_words:
            _mask_tokens(logits[row], point)


def _is_counted(point: SamplePoint) -> bool:
    return point.sampling.frequency_penalty != 0 or point.sampling.presence_penalty != 0


def _penalize_repetition(logits: torch.Tensor, points: Sequence[SamplePoint], rows: Sequence[int]) -> None:
    """Apply the repetition penalty. A repeated token is written several times with the same value."""
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


def _add_biases(logits: torch.Tensor, points: Sequence[SamplePoint], rows: Sequence[int]) -> None:
    biases = [points[row].sampling.logit_bias for row in rows]
    row, token = _occurrences(rows, [[token for token, _ in bias] for bias in biases], logits.device)
    added = _by_row([value for bias in biases for _, value in bias], logits)
    before = logits[row, token]
    _write(logits, row, token, before, before + added)


def _mask_tokens(logits: torch.Tensor, point: SamplePoint) -> None:
    """Mask the tokens of one row `[vocabulary]` that are not allowed or would complete a bad word."""
    allowed = point.sampling.allowed_token_ids
    if allowed:
        kept = torch.tensor(allowed, device=logits.device)
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
    return row.to(device), _int64(chain.from_iterable(texts)).to(device)


def _int64(numbers: Iterable[int]) -> torch.Tensor:
    """Return the numbers as int64; `array` reads Python integers several times faster than `torch.tensor`."""
    packed = array("q", numbers)
    return torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0, dtype=torch.int64)


def _by_row(values: Sequence[float], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=logits.device)


def _write(
    logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor, before: torch.Tensor, after: torch.Tensor
) -> None:
    after = after.clamp(-_LARGEST, _LARGEST)
    logits[row, token] = torch.where(before.isfinite(), after, before)


_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_PROTOTYPES = {
    "mask_logits": (None, (_POINTER, _INT32, _POINTER, _POINTER, _INT32, _INT32)),
    "find_likeliest": (
        None,
        (_POINTER, _INT32, _POINTER, _POINTER, _INT32, _INT32, _POINTER, _POINTER),
    ),
}


def mask_rows(
    logits: torch.Tensor, rows: Sequence[int], words: Words, library: ctypes.CDLL | None = None
) -> None:
    """Set the logits of tokens whose bit in `words` is 0 to −inf, in place.

    `logits` `[all rows, vocabulary]` fp32, `words` `[len(rows), words]` uint32.
    """
    if library is not None and logits.is_contiguous():
        declare(library, _PROTOTYPES)
        at = np.array(rows, dtype=np.int64)
        library.mask_logits(
            logits.data_ptr(), logits.shape[1], at.ctypes.data, words.ctypes.data, len(rows), words.shape[1]
        )
        return
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    at_rows = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    logits[at_rows] = logits[at_rows].masked_fill(forbidden, -_INFINITY)


def likeliest(
    logits: torch.Tensor, library: ctypes.CDLL | None, rows: Sequence[int], words: Words | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logit of each of `rows`, fp32, and the first token id that has it, int64.

    `logits` `[all rows, vocabulary]` fp32. Only tokens whose bit is set in `words` `[len(rows), words]`
    count: −inf if none is, NaN if any of them is NaN. Without `library`, `words` mask `logits` in place.
    """
    if library is None or not logits.is_contiguous():
        if words is not None:
            mask_rows(logits, rows, words)
        if rows != range(len(logits)):
            logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
        highest, tokens = logits.max(-1)
        return highest, tokens
    declare(library, _PROTOTYPES)
    at = np.array(rows, dtype=np.int64)
    tokens = torch.empty(len(rows), dtype=torch.int64)
    highest = torch.empty(len(rows))
    library.find_likeliest(
        logits.data_ptr(),
        logits.shape[1],
        at.ctypes.data,
        None if words is None else words.ctypes.data,
        len(rows),
        0 if words is None else words.shape[1],
        tokens.data_ptr(),
        highest.data_ptr(),
    )
    return highest, tokens


def measure(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return log-probabilities of raw `logits` `[rows, vocabulary]` fp32, one entry per row.

    Each holds that of `tokens[row]`, int64, and those of the `tops[row]` likeliest tokens.
    """
    total = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(-1, tokens[:, None]) - total).squeeze(-1).tolist()
    best = logits.topk(min(max(tops), logits.shape[-1]))
    ids, values = best.indices.tolist(), (best.values - total).tolist()
    return [
        TokenLogprobs(chosen[row], tuple(zip(ids[row][:top], values[row][:top], strict=True)))
        for row, top in enumerate(tops)
    ]


def sample(
    found: Logits,
    points: Sequence[SamplePoint],
    library: CDLL | None = None,
    masks: RowMasks | None = None,
) -> list[Sampled | None]:
    """Return one token per row; None if the row's highest logit is not finite.

    Changes `found.values` in place. `library`: the native library, for logits on the CPU.
    """
    if all(map(_takes_likeliest, points)):
        if found.likeliest is not None and found.highest is not None:
            return _plain(*_allowed(found.likeliest, found.highest, found.values.float(), library, masks))
        if masks is None:
            highest, tokens = likeliest(found.values.float(), library, range(len(points)))
            return _plain(tokens, highest)
    return _sample(found.values.float(), points, library, masks)


def take_likeliest(
    logits: torch.Tensor, rows: Sequence[int], points: Sequence[SamplePoint], library: CDLL | None = None
) -> list[Sampled | None] | None:
    """Sample `rows` of `logits` `[all rows, vocabulary]` greedily without copying them.

    Return None if any of `points` needs more than the likeliest token.
    """
    if not all(map(_takes_likeliest, points)):
        return None
    highest, tokens = likeliest(logits.float(), library, rows)
    return _plain(tokens, highest)


def _allowed(
    tokens: torch.Tensor,
    highest: torch.Tensor,
    logits: torch.Tensor,
    library: CDLL | None,
    masks: RowMasks | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return likeliest tokens and highest logits `[rows]`, with the grammar masks applied."""
    if masks is None:
        return tokens, highest
    of_masked = likeliest(logits, library, masks.rows, masks.wait())
    if len(masks.rows) < len(tokens):
        highest[masks.rows], tokens[masks.rows] = of_masked
        return tokens, highest
    return of_masked[1], of_masked[0]


def _takes_likeliest(point: SamplePoint) -> bool:
    sampling = point.sampling
    return (
        sampling.temperature == 0
        and sampling.top_logprobs is None
        and sampling.repetition_penalty == 1
        and sampling.frequency_penalty == 0
        and sampling.presence_penalty == 0
        and sampling.min_tokens <= point.index
        and not (sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words)
    )


def _plain(tokens: torch.Tensor, highest: torch.Tensor) -> list[Sampled | None]:
    return [Sampled(token) if is_finite else None for token, is_finite in _told(tokens, highest)]


def _told(tokens: torch.Tensor, highest: torch.Tensor) -> list[tuple[int, bool]]:
    """Return each row's token and whether its logit is finite, in one copy, as each copy waits for a GPU."""
    both = torch.stack([tokens, highest.isfinite().to(tokens.dtype)]).tolist()
    return [(token, bool(is_finite)) for token, is_finite in zip(*both, strict=True)]


def _sample(
    logits: torch.Tensor, points: Sequence[SamplePoint], library: CDLL | None, masks: RowMasks | None
) -> list[Sampled | None]:
    tops = {row: top for row, point in enumerate(points) if (top := point.sampling.top_logprobs) is not None}
    measured = list(tops)
    raw = logits[measured] if tops else logits[:0]
    penalize(logits, points)
    if masks is not None:
        mask_rows(logits, masks.rows, masks.wait(), library)
    highest, tokens = likeliest(logits, library, range(len(points)))
    drawn = [row for row, point in enumerate(points) if point.sampling.temperature > 0 and point.index >= 0]
    if drawn and library is not None:
        wishes = [wish_of(row, points[row]) for row in drawn]
        tokens[drawn] = torch.tensor(draw_natively(library, logits.contiguous(), highest, wishes))
    elif drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = draw(logits[rows] - highest[rows, None], [points[row] for row in drawn])
    for row, point in enumerate(points):
        if (forced := point.forced) is not None:
            tokens[row] = forced
    found = measure(raw, tokens[measured], list(tops.values())) if tops else []
    logprobs = dict(zip(tops, found, strict=True))
    chosen = enumerate(_told(tokens, highest))
    return [Sampled(token, logprobs.get(row)) if ok else None for row, (token, ok) in chosen]
