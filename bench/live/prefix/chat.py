"""Chats of many turns: each turn's prompt is everything said before and a new line of the user's.

Source: papers/002 §VII-B, which found no gain because its cache could not grow with a conversation.
"""

import asyncio
import random
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench.kit.load import Answer, Target, complete
from bench.live.prefix.load import LoadResult

_DEADLINE_S = 240.0
_WORDS = (
    "the a of to and we they river stone letter winter market small old bright asks gives finds keeps near"
    " over under why when how much many people story road city night morning music work answer question"
).split()


@dataclass(frozen=True)
class Chats:
    """`at_once` people, each talking to the end of a conversation; no time to think in between."""

    at_once: int = 12
    turns: int = 10
    system_words: int = 120
    user_words: int = 40
    output_tokens: int = 32
    kv_blocks: int = 640
    host_blocks: int = 1024


QUICK = Chats(at_once=4, turns=4, kv_blocks=160, host_blocks=256)


@dataclass(frozen=True)
class Talked:
    served: LoadResult
    later_first_s: float
    """Median time to first token of all turns but the first."""


async def talk(target: Target, shape: Chats, draw: random.Random) -> Talked:
    """All conversations, side by side."""
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
