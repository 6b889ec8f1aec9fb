"""From times of tokens to figures: first tokens, gaps, rates. Pure."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Of one batch of answers, on one side. Seconds."""

    first_s: float
    """Median time to the first token."""
    gap_s: float
    """Median gap between two tokens of an answer."""
    tok_s: float
    """Tokens per second from the beginning to the last token."""


def pace_of(token_s: Sequence[Sequence[float]], tokens: int, total_s: float) -> Pace:
    """`token_s`: when each answer's tokens came, since its request. Raises ValueError without any."""
    gaps = [b - a for one in token_s for a, b in itertools.pairwise(one)]
    if not gaps or total_s <= 0:
        raise ValueError("no answer of two tokens to measure")
    return Pace(statistics.median(one[0] for one in token_s), statistics.median(gaps), tokens / total_s)


def median_difference_ms(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    """Of ours over theirs, taken within each alternation. Raises ValueError when they do not pair up."""
    return statistics.median(a - b for a, b in zip(ours_s, theirs_s, strict=True)) * 1e3
