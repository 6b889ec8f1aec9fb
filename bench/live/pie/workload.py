"""Held-out chats as token ids for the live bench: prompts, and how long their answers are. Knows no engine.

A model with random weights ends no answer by itself: there the length is that of the text's own answer. A
trained one ends by its end token, under one limit for all.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random

from bench.kit.models import RANDOM_SHAPES, TINY_CHAT
from bench.live.pie.loop import Request
from models.train_tiny_chat.chat import END, Chat, ask
from models.train_tiny_chat.stories import story_chat
from models.train_tiny_chat.templates import template_chat
from services.predictor.samples import load_tokenizer
from shared.errors import ConfigError

_STORY_SHARE = 0.6
MOST_TOKENS = 256
"""Of an answer."""
_LEAST_TOKENS = 8


class Workload:
    """The same requests for every side, in the same order, without end."""

    def __init__(self, model: str, seed: int, trace: Path | None = None) -> None:
        """`trace`: JSONL rows with `prompt` and `response`, instead of drawn chats. Raises ConfigError."""
        self._seed = seed
        self._tokenizer = load_tokenizer(TINY_CHAT)
        self._end = self._encode(END)
        self._is_random = Path(model).name in RANDOM_SHAPES
        self._chats = None if trace is None else _read(trace)

    def requests(self, spread: int = 0) -> Iterator[Request]:
        """From the beginning. Answers to the first `spread`, which all begin at once, end early at random."""
        early = Random(f"pie/{self._seed}/spread")
        for number, request in enumerate(self._whole()):
            share = early.random() if number < spread else 1.0
            yield replace(request, max_tokens=max(1, int(share * request.max_tokens)))

    def _whole(self) -> Iterator[Request]:
        chats = _drawn(Random(f"pie/{self._seed}")) if self._chats is None else cycle(self._chats)
        for chat in chats:
            prompt, length = self._encode(chat.prompt()), len(self._encode(chat.answer() + END))
            if self._is_random:
                yield Request(prompt, max(_LEAST_TOKENS, min(length, MOST_TOKENS)))
            else:
                yield Request(prompt, MOST_TOKENS, self._end)

    def mean_tokens(self, requests: int = 200) -> float:
        """Of prompt and answer, as the texts have them."""
        drawn = _drawn(Random(f"pie/{self._seed}")) if self._chats is None else cycle(self._chats)
        total = 0
        for _, chat in zip(range(requests), drawn, strict=False):
            total += len(self._encode(chat.prompt()))
            total += min(MOST_TOKENS, len(self._encode(chat.answer() + END)))
        return total / requests

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _drawn(draw: Random) -> Iterator[Chat]:
    while True:
        yield story_chat(draw) if draw.random() < _STORY_SHARE else template_chat(draw)


def _read(trace: Path) -> list[Chat]:
    try:
        rows = [json.loads(line) for line in trace.read_text("utf-8").splitlines() if line.strip()]
        chats = [ask("trace", str(row["prompt"]), str(row["response"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{trace.name}: {error!r}; each row needs `prompt` and `response`", param="trace"
        ) from error
    if not chats:
        raise ConfigError(f"{trace.name} has no rows", param="trace")
    return chats
