"""Text analysis: a few long templates, each request one of them with a text of its own after it.

Source: papers/002 §VII-A. Sizes are in tokens; tiers in prefixes, as the paper counts them.
"""

import random
from dataclasses import dataclass
from typing import Any

from bench.kit.load import Target
from bench.live.prefix.load import LoadResult, serve_all

BLOCK_TOKENS = 16
_FIRST_TOKEN = 16
"""Lower ids are special."""


@dataclass(frozen=True)
class Templates:
    """How large everything is. The paper: 128 prefixes, room for 8 on the GPU, 32 in memory, 128 on disk."""

    prefixes: int = 128
    device: int = 8
    host: int = 32
    disk: int = 128
    prefix_tokens: int = 400
    body_tokens: int = 32
    output_tokens: int = 8
    requests: int = 192
    at_once: int = 48

    @property
    def prefix_blocks(self) -> int:
        return -(-self.prefix_tokens // BLOCK_TOKENS)

    @property
    def device_blocks(self) -> int:
        """For so many whole requests."""
        tokens = self.prefix_tokens + self.body_tokens + self.output_tokens
        return self.device * (-(-tokens // BLOCK_TOKENS) + 1)


QUICK = Templates(prefixes=24, device=3, host=8, disk=24, requests=72, at_once=16)


@dataclass(frozen=True)
class Requests:
    """Bodies of HTTP requests: one of each prefix, in any order, then those that are measured."""

    first: list[dict[str, Any]]
    measured: list[dict[str, Any]]


def requests_of(shape: Templates, vocabulary: int, draw: random.Random) -> Requests:
    """The same for every cell of one run."""
    prefixes = [_tokens(shape.prefix_tokens, vocabulary, draw) for _ in range(shape.prefixes)]

    def body(prefix: list[int]) -> dict[str, Any]:
        return {
            "prompt": [*prefix, *_tokens(shape.body_tokens, vocabulary, draw)],
            "max_tokens": shape.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    first = [body(prefix) for prefix in prefixes]
    draw.shuffle(first)
    return Requests(first, [body(draw.choice(prefixes)) for _ in range(shape.requests)])


async def analyse(target: Target, requests: Requests, shape: Templates, *, warm: bool) -> LoadResult:
    """`warm`: each prefix is seen once before; else a few requests only, so that code is warm."""
    await serve_all(target, requests.first if warm else requests.first[:4], shape.at_once)
    return await serve_all(target, requests.measured, shape.at_once)


def _tokens(count: int, vocabulary: int, draw: random.Random) -> list[int]:
    return [draw.randrange(_FIRST_TOKEN, vocabulary) for _ in range(count)]
