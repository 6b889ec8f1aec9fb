"""Features of a prompt for the regressor: hashed n-grams of token ids, and its length.

N-grams are one to four consecutive tokens, pairs with a gap, and prefixes of up to `HEAD_GRAMS` tokens. Each
is hashed to one of `BUCKETS`; every bucket counts once. Any tokenizer will do, but a trained model belongs to
the tokenizer it was trained with. Of a long prompt, only head and tail are used. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BUCKETS = 1 << 15
LONGEST_GRAM = 4
HEAD_GRAMS = 8
DENSE = 4
_HEAD_TOKENS = 192
_TAIL_TOKENS = 128
_GAP_SALT, _HEAD_SALT = 200, 100

Codes = npt.NDArray[np.uint64]
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_OTHER = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@dataclass(frozen=True)
class Features:
    """Features of a batch of prompts, in the layout of `torch.nn.EmbeddingBag`."""

    buckets: npt.NDArray[np.int64]
    """[all]: buckets of all prompts, concatenated."""
    offsets: npt.NDArray[np.int64]
    """[prompts]: where each prompt's buckets begin."""
    weights: npt.NDArray[np.float32]
    """[all]: 1 / √(number of buckets of the prompt)."""
    dense: npt.NDArray[np.float32]
    """[prompts, DENSE]: three transforms of the prompt's length, and 1."""


def features_of(prompts: Sequence[bytes]) -> Features:
    """Return the features of prompts given as packed token ids (`pack_tokens`)."""
    tokens = [_clipped(np.frombuffer(prompt, dtype="<u4")) for prompt in prompts]
    sizes = np.array([len(one) for one in tokens], dtype=np.int64)
    rows = np.repeat(np.arange(len(tokens)), sizes)
    flat = np.concatenate(tokens).astype(np.uint64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    found = [*_grams(flat, rows), *_heads(flat, starts, sizes)]
    buckets = [(gram_rows, (codes % np.uint64(BUCKETS)).astype(np.int64)) for gram_rows, codes in found]
    codes = np.unique(np.concatenate([gram_rows * BUCKETS + each for gram_rows, each in buckets]))
    counts = np.bincount(codes // BUCKETS, minlength=len(tokens))
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    weights = np.repeat(1.0 / np.sqrt(np.maximum(counts, 1)), counts)
    totals = np.array([len(prompt) // 4 for prompt in prompts], dtype=np.float64)
    dense = np.stack(
        [np.log1p(totals), np.minimum(totals, 50) / 50, np.minimum(totals, 300) / 300, np.ones(len(totals))],
        axis=1,
    )
    return Features(
        (codes % BUCKETS).astype(np.int64),
        offsets.astype(np.int64),
        weights.astype(np.float32),
        dense.astype(np.float32),
    )


def _clipped(tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    if len(tokens) <= _HEAD_TOKENS + _TAIL_TOKENS:
        return tokens
    return np.concatenate([tokens[:_HEAD_TOKENS], tokens[-_TAIL_TOKENS:]])


def _mixed(code: Codes, token: Codes) -> Codes:
    mixed: Codes = (code ^ (token + _OTHER)) * _PRIME
    return mixed ^ (mixed >> _SHIFT)


def _salted(count: int, salt: int) -> Codes:
    return np.full(count, salt, dtype=np.uint64)


_Found = tuple[npt.NDArray[np.int64], Codes]
"""Row of the prompt and hash, for each occurrence."""


def _grams(flat: Codes, rows: npt.NDArray[np.int64]) -> list[_Found]:
    found: list[_Found] = []
    for size in range(1, LONGEST_GRAM + 1):
        count = max(0, len(flat) - size + 1)
        codes = _salted(count, size)
        for step in range(size):
            codes = _mixed(codes, flat[step : step + count])
        inside = rows[:count] == rows[size - 1 : size - 1 + count]
        found.append((rows[:count][inside], codes[inside]))
    count = max(0, len(flat) - 2)
    pairs = _mixed(_mixed(_salted(count, _GAP_SALT), flat[:count]), flat[2 : 2 + count])
    inside = rows[:count] == rows[2 : 2 + count]
    return [*found, (rows[:count][inside], pairs[inside])]


def _heads(flat: Codes, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[_Found]:
    found: list[_Found] = []
    codes = _salted(len(starts), _HEAD_SALT)
    for position in range(HEAD_GRAMS):
        rows = np.flatnonzero(sizes > position)
        codes[rows] = _mixed(codes[rows], flat[starts[rows] + position])
        found.append((rows, codes[rows].copy()))
    return found
