"""Log-probabilities as OpenAI's two schemas write them.

What has no finite value is written as -9999.0: JSON has no infinities. Knows nothing of where
values come from.
"""

import math
from collections.abc import Sequence
from typing import Any

from services.gateway.alignment import PlacedToken
from services.gateway.vocabulary import Vocabulary

LOWEST = -9999.0
"""What OpenAI and vLLM write for a token that is next to impossible."""


def chat_logprobs(placed: Sequence[PlacedToken], vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: each token with its `top` likeliest alternatives."""
    content = []
    for item in placed:
        likeliest = [_entry(token, value, vocabulary) for token, value in item.logprobs.top[:top]]
        chosen = _entry(item.token, item.logprobs.chosen, vocabulary)
        content.append({**chosen, "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def text_logprobs(placed: Sequence[PlacedToken], vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: parallel lists; the chosen token is always in `top_logprobs`."""
    return {
        "tokens": [vocabulary.text(item.token) for item in placed],
        "token_logprobs": [finite(item.logprobs.chosen) for item in placed],
        "top_logprobs": [_by_text(item, vocabulary, top) for item in placed],
        "text_offset": [item.offset for item in placed],
    }


def finite(value: float) -> float:
    """`value`, or `LOWEST` where it is lower, infinite or no number."""
    return max(value, LOWEST) if math.isfinite(value) else LOWEST


def _entry(token: int, value: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.bytes_of(token)
    return {"token": vocabulary.text(token), "logprob": finite(value), "bytes": list(data)}


def _by_text(item: PlacedToken, vocabulary: Vocabulary, top: int) -> dict[str, float]:
    """By text, the likeliest first. Of two ids with one text the likelier counts, or the chosen one."""
    found: dict[str, float] = {}
    for token, value in item.logprobs.top[:top]:
        found.setdefault(vocabulary.text(token), finite(value))
    found[vocabulary.text(item.token)] = finite(item.logprobs.chosen)
    return found
