"""Prompts of the serve bench as token ids: lessons for the predictor, and others to measure.

They are new stories and exercises of Tiny Chat's kind without repetition, or a file. The model may know some
from its training; the predictor knows none of those measured.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.train_tiny_chat.chat import END, Chat, ask
from models.train_tiny_chat.stories import story_chat
from models.train_tiny_chat.templates import template_chat
from services.predictor.samples import load_tokenizer
from shared.errors import ConfigError

_TRIES = 50
"""Draws per wanted prompt before giving up."""


@dataclass(frozen=True)
class Prompts:
    """`lessons` are served in advance; `measured` shares no prompt with them."""

    lessons: tuple[tuple[int, ...], ...]
    measured: tuple[tuple[int, ...], ...]
    mean_request_tokens: float
    """Mean tokens of prompt and limited answer among those measured, used to size the KV."""


def drawn_prompts(
    draw: random.Random, model: Path, *, lessons: int, measured: int, max_tokens: int, story_share: float
) -> Prompts:
    """Return random prompts. Raises ConfigError if the templates have too few different ones."""
    chats = (
        story_chat(draw) if draw.random() < story_share else template_chat(draw)
        for _ in range(_TRIES * (lessons + measured))
    )
    return _prompts(chats, model, lessons, measured, max_tokens)


def read_prompts(file: Path, model: Path, *, lessons: int, measured: int, max_tokens: int) -> Prompts:
    """Read JSONL rows with `prompt` and `response` or `length` (tokens). Raises ConfigError."""
    try:
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
        chats = [ask("trace", str(row["prompt"]), _response(row)) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file.name}: {error!r}; each row needs `prompt` and `response` or `length`", param="trace"
        ) from error
    return _prompts(chats, model, lessons, measured, max_tokens)


def with_prefixes(prompts: Prompts, draw: random.Random, *, count: int, tokens: int) -> Prompts:
    """Put one of `count` shared prefixes of `tokens` tokens before each prompt."""
    known = sorted({token for prompt in prompts.lessons for token in prompt})
    beginnings = [tuple(draw.choices(known, k=tokens)) for _ in range(count)]
    lessons, measured = (
        tuple(draw.choice(beginnings) + prompt for prompt in each)
        for each in (prompts.lessons, prompts.measured)
    )
    return Prompts(lessons, measured, prompts.mean_request_tokens + tokens)


def _response(row: dict[str, object]) -> str:
    """Return the response, or `length` short words of one token each."""
    if "response" in row:
        return str(row["response"])
    return "the " * int(str(row["length"]))


def _prompts(chats: Iterable[Chat], model: Path, lessons: int, measured: int, max_tokens: int) -> Prompts:
    chosen = _different(chats, lessons + measured)
    if len(chosen) < lessons + measured:
        raise ConfigError(
            f"only {len(chosen)} different prompts; {lessons} to learn from and {measured} to be measured "
            "are wanted: lower --lessons or --pool",
            param="trace",
        )
    encoder = load_tokenizer(model)
    ids = [one.ids for one in encoder.encode_batch([c.prompt() for c in chosen], add_special_tokens=False)]
    answers = [c.answer() + END for c in chosen[lessons:]]
    encoded = encoder.encode_batch(answers, add_special_tokens=False)
    answer_tokens = [min(max_tokens, len(one.ids)) for one in encoded]
    prompts = [tuple(one) for one in ids]
    tokens = sum(len(one) for one in prompts[lessons:]) + sum(answer_tokens)
    return Prompts(tuple(prompts[:lessons]), tuple(prompts[lessons:]), tokens / measured)


def _different(chats: Iterable[Chat], count: int) -> list[Chat]:
    seen: dict[str, Chat] = {}
    for chat in chats:
        seen.setdefault(chat.prompt(), chat)
        if len(seen) == count:
            break
    return list(seen.values())


def indices(prompts: int, requests: int, draw: random.Random) -> Sequence[int]:
    """Return prompt indices; every prompt comes once before any repeats."""
    found: list[int] = []
    while len(found) < requests:
        found += draw.sample(range(prompts), prompts)
    return found[:requests]
