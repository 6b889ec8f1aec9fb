"""Draws a token from a row of logits, after temperature, min_p, top-k and top-p in this order.

The draw is an exponential race: each token's arrival time is a hash of (seed, choice, index, token), with
its probability as rate, and the earliest wins. No generator state moves between workers, and logits that
differ a little seldom give another token (Bavarian et al. 2016; decision 0005). On the CPU the draw runs in
C++ (`draw.h`)."""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.core.sampling import SamplePoint
from services.worker.engine.native.library import NativeDraw
from services.worker.engine.paged import to_device
from shared.messages.sequence import Sampling

_CANDIDATES = 256
_MOST_RANKS = 2**31 - 1
_MASK, _GOLDEN = (1 << 64) - 1, 0x9E3779B97F4A7C15
_HALF, _STEP, _SECOND = (1 << 32) - 1, 0x9E3779B1, 0x85EBCA6B


def wish_of(row: int, point: SamplePoint) -> NativeDraw:
    """Return the sampling parameters of `point` for `row` of the logits."""
    sampling = point.sampling
    return NativeDraw(
        row=row,
        temperature=sampling.temperature,
        min_p=sampling.min_p,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, _MOST_RANKS) if sampling.top_k > 0 else 0,
        key=key_of(sampling.seed, point.choice, point.index),
    )


def draw_natively(
    library: ctypes.CDLL, logits: torch.Tensor, highest: torch.Tensor, wishes: list[NativeDraw]
) -> list[int]:
    """Return a token for each of `wishes`, in C++; any token if the row's highest logit is not finite.

    `logits` `[rows, vocabulary]` fp32, contiguous; `highest` `[rows]` fp32."""
    draws, vocabulary = (NativeDraw * len(wishes))(*wishes), logits.shape[1]
    scratch = torch.empty(vocabulary)
    library.draw_tokens(
        logits.data_ptr(), highest.data_ptr(), vocabulary, scratch.data_ptr(), draws, len(wishes)
    )
    return [draw.token for draw in draws]


def draw(logits: torch.Tensor, points: Sequence[SamplePoint]) -> torch.Tensor:
    """Return tokens, int64 `[rows]`, drawn from `logits` `[rows, vocabulary]` whose row maximum is 0."""
    device = logits.device
    temperatures = to_device(torch.tensor([point.sampling.temperature for point in points]), device)
    logits = logits / temperatures.clamp_min(1e-5)[:, None]
    floored = [row for row, point in enumerate(points) if point.sampling.min_p > 0]
    if floored:
        rows = to_device(torch.tensor(floored), device)
        floors = [
            math.log(points[row].sampling.min_p) for row in floored
        ]  # The likeliest token's logit is 0.
        least = to_device(torch.tensor(floors, dtype=torch.float32), device)
        unlikely = logits[rows] < least[:, None]
        logits[rows] = logits[rows].masked_fill(unlikely, -math.inf)
    probabilities = logits.softmax(-1)
    filtered = [
        row for row, point in enumerate(points) if point.sampling.top_k > 0 or point.sampling.top_p < 1
    ]
    if filtered:
        rows = to_device(torch.tensor(filtered), device)
        probabilities[rows] = _filter(probabilities[rows], [points[row].sampling for row in filtered])
    keys = [key_of(point.sampling.seed, point.choice, point.index) for point in points]
    return (arrivals(keys, logits.shape[-1], device) / probabilities).argmin(-1)


def key_of(seed: int, choice: int, index: int) -> int:
    """Return the 64-bit hash key of the race for one token of one answer.

    The hash is splitmix64's finalizer (Steele, Lea, Flood 2014), once for each part."""
    state = 0
    for part in (seed, choice, index):
        state = ((state ^ part) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def arrivals(keys: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return exponential arrival times at rate 1, fp64 `[keys, vocabulary]`."""
    halves = torch.tensor([[key & _HALF for key in keys], [key >> 32 for key in keys]], dtype=torch.int64)
    low, high = to_device(halves, device)[:, :, None]
    mixed = _scatter(torch.arange(vocabulary, device=device) * _STEP + low & _HALF)
    above, below = _scatter(mixed ^ high), _scatter(mixed + _SECOND & _HALF)
    early = (above.double() + (below.double() + 0.5) * 2.0**-32) * 2.0**-32
    return -torch.log1p(-early.clamp_max(1 - 2.0**-53))


def _scatter(value: torch.Tensor) -> torch.Tensor:
    """lowbias32 (Wellons 2018, Prospecting for hash functions): a hash of 32 bits, in int64."""
    value = (value ^ (value >> 16)) * 0x7FEB352D & _HALF
    value = (value ^ (value >> 15)) * 0x846CA68B & _HALF
    return value ^ (value >> 16)


def _filter(
    probabilities: torch.Tensor, samplings: Sequence[Sampling], candidates: int = _CANDIDATES
) -> torch.Tensor:
    """Apply top-k and top-p: zero tokens less likely than the last token kept; ties stay.

    Only the `candidates` likeliest tokens are sorted. Rows that need more are filtered again with all tokens.
    """
    device, vocabulary = probabilities.device, probabilities.shape[-1]
    most = [sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary for sampling in samplings]
    width = min(vocabulary, candidates)
    if width < vocabulary or device.type != "cpu":
        ordered = probabilities.topk(width).values
    else:  # numpy sorts values with vector instructions; torch also sorts indices, far slower on a CPU.
        ordered = torch.from_numpy(np.sort(probabilities.numpy(), axis=-1)).flip(-1)
    ranks = torch.arange(width, device=device)
    ordered = ordered.masked_fill(ranks >= to_device(torch.tensor(most), device)[:, None], 0.0)
    shares = to_device(torch.tensor([sampling.top_p for sampling in samplings]), device)[:, None]
    cut_by_rank = to_device(torch.tensor([limit <= width for limit in most]), device)[:, None]
    total = torch.where(cut_by_rank, ordered.sum(-1, keepdim=True), probabilities.sum(-1, keepdim=True))
    before = ordered.cumsum(-1) - ordered
    kept = (ordered > 0) & ((before < shares * total) | (shares >= 1) | (ranks == 0))
    last = (kept.sum(-1, keepdim=True) - 1).clamp_min(0)
    result = probabilities * (probabilities >= ordered.gather(-1, last))
    ranked = torch.tensor([width < limit < vocabulary for limit in most], device=device)
    open_ended = (ranked | (kept[:, -1:] & ~cut_by_rank).squeeze(-1)).nonzero().squeeze(-1)
    if len(open_ended):
        rows = open_ended.tolist()
        result[open_ended] = _filter(probabilities[open_ended], [samplings[row] for row in rows], vocabulary)
    return result
