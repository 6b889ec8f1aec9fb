"""Text analysis: each request is one of a few long templates followed by its own text.

Source: papers/002 §VII-A. Sizes are in tokens; tiers in prefixes, as in the paper.
"""

import asyncio
import random
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench.kit.load import Answer, LoadResult, Target, complete, full_answer, serve_all

BLOCK_TOKENS = 16
_FIRST_TOKEN = 16
"""Lower ids are special tokens."""


@dataclass(frozen=True)
class Templates:
    """Sizes. In the paper: 128 prefixes, room for 8 on the GPU, 32 in memory, 128 on disk."""

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
        """KV blocks for `device` whole requests."""
        tokens = self.prefix_tokens + self.body_tokens + self.output_tokens
        return self.device * (-(-tokens // BLOCK_TOKENS) + 1)


QUICK = Templates(prefixes=24, device=3, host=8, disk=24, requests=72, at_once=16)


@dataclass(frozen=True)
class Requests:
    """Request bodies: one per prefix in random order, then those that are measured."""

    first: list[dict[str, Any]]
    measured: list[dict[str, Any]]


def requests_of(shape: Templates, vocabulary: int, draw: random.Random) -> Requests:
    """Return the requests, the same for every cell of a run."""
    prefixes = [_tokens(shape.prefix_tokens, vocabulary, draw) for _ in range(shape.prefixes)]

    def body(prefix: list[int]) -> dict[str, Any]:
        return full_answer([*prefix, *_tokens(shape.body_tokens, vocabulary, draw)], shape.output_tokens)

    first = [body(prefix) for prefix in prefixes]
    draw.shuffle(first)
    return Requests(first, [body(draw.choice(prefixes)) for _ in range(shape.requests)])


async def analyse(target: Target, requests: Requests, shape: Templates, *, warm: bool) -> LoadResult:
    """Measure the requests. `warm` sends each prefix once before; else a few requests warm up the code."""
    await serve_all(target, requests.first if warm else requests.first[:4], shape.at_once)
    return await serve_all(target, requests.measured, shape.at_once)


def _tokens(count: int, vocabulary: int, draw: random.Random) -> list[int]:
    return [draw.randrange(_FIRST_TOKEN, vocabulary) for _ in range(count)]


_DEADLINE_S = 240.0
_WORDS = (
    "the a of to and we they river stone letter winter market small old bright asks gives finds keeps near"
    " over under why when how much many people story road city night morning music work answer question"
).split()


@dataclass(frozen=True)
class Chats:
    """`at_once` clients, each with one conversation and no pauses."""

    at_once: int = 12
    turns: int = 10
    system_words: int = 120
    user_words: int = 40
    output_tokens: int = 32
    kv_blocks: int = 640
    host_blocks: int = 1024


QUICK_CHATS = Chats(at_once=4, turns=4, kv_blocks=160, host_blocks=256)


@dataclass(frozen=True)
class Talked:
    served: LoadResult
    later_first_s: float
    """Median time to the first token over all turns but the first."""


async def talk(target: Target, shape: Chats, draw: random.Random) -> Talked:
    """Run all conversations in parallel."""
    target = replace(target, path="/v1/chat/completions")
    system = _words(shape.system_words, draw)
    lines = [[_words(shape.user_words, draw) for _ in range(shape.turns)] for _ in range(shape.at_once)]
    began_s = time.perf_counter()
    talks = await asyncio.gather(*(_converse(target, system, mine, shape) for mine in lines))
    elapsed_s = time.perf_counter() - began_s
    later = [answer.first_s for answers in talks for answer in answers[1:] if answer.ok and answer.event_s]
    served = LoadResult([answer for answers in talks for answer in answers], elapsed_s)
    return Talked(served, median(later) if later else 0.0)


async def _converse(target: Target, system: str, lines: list[str], shape: Chats) -> list[Answer]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    answers: list[Answer] = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        body = {
            "messages": list(messages),
            "max_tokens": shape.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await complete(target, body, _DEADLINE_S)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
    return answers


def _words(count: int, draw: random.Random) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(count))
