"""Workloads that are short of memory in several ways, and one that is not.

Pure. Sizes are for two workers of `KV_BLOCKS`, 3,072 tokens together. Prompts are random token ids and
answers end at their limit, so all sides have the same work; every turn has new requests.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from bench.kit.models import drawn_tokens
from bench.kit.stacks import Settings

WORKERS, KV_BLOCKS, BLOCK_TOKENS = 2, 96, 16


@dataclass(frozen=True)
class Request:
    """A prompt in token ids, with the length of its answer."""

    prompt: list[int]
    answer_tokens: int
    at_s: float = 0.0
    """Earliest time to send it, in seconds after the start of the turn."""


@dataclass(frozen=True)
class Workload:
    """A workload."""

    name: str
    about: str
    requests: int
    few: int
    """Requests of a quick run, as a smoke test."""
    at_once: int
    """Clients: the maximum of requests in flight."""
    endless: Callable[[Random, int], Iterator[Request]]
    """Yields requests, given the size of the vocabulary."""
    is_short: bool = True
    """Whether memory is short."""
    kv_blocks: int = KV_BLOCKS
    """KV blocks of each worker."""
    settings: Settings = field(default_factory=dict)
    """Further settings of every side."""
    sides: tuple[str, ...] = ()
    """Sides to measure; empty for all."""
    model: str = ""
    """Replaces the model of the run."""

    def draw(self, dice: Random, vocabulary: int, *, quick: bool = False) -> list[Request]:
        """Return the requests of one turn in order."""
        return list(islice(self.endless(dice, vocabulary), self.few if quick else self.requests))


def _mixed(dice: Random, vocabulary: int) -> Iterator[Request]:
    beginnings = [drawn_tokens(dice, vocabulary, 450) for _ in range(5)]
    while True:
        kind = dice.random()
        if kind < 0.55:
            question = drawn_tokens(dice, vocabulary, 28)
            yield Request(dice.choice(beginnings) + question, dice.randint(30, 50))
        elif kind < 0.93:
            yield Request(drawn_tokens(dice, vocabulary, 40), dice.randint(200, 260))
        else:
            yield Request(drawn_tokens(dice, vocabulary, 1800), dice.randint(30, 40))


def _prefixes(dice: Random, vocabulary: int) -> Iterator[Request]:
    """Yield 24 chats of three turns on six prefixes, then 24 others on the same."""
    beginnings = [drawn_tokens(dice, vocabulary, 400) for _ in range(6)]
    while True:
        chats = [list(beginnings[at % 6]) for at in range(24)]
        for _ in range(3):
            for chat in chats:
                chat.extend(drawn_tokens(dice, vocabulary, dice.randint(30, 50)))
                yield Request(list(chat), dice.randint(30, 60))
                chat.extend(drawn_tokens(dice, vocabulary, 40))


def _long(dice: Random, vocabulary: int) -> Iterator[Request]:
    while True:
        for place in range(12):
            if place == 5:
                yield Request(drawn_tokens(dice, vocabulary, dice.randint(1600, 2000)), dice.randint(30, 60))
            else:
                yield Request(drawn_tokens(dice, vocabulary, dice.randint(40, 160)), dice.randint(80, 200))


def _answers(dice: Random, vocabulary: int) -> Iterator[Request]:
    while True:
        yield Request(drawn_tokens(dice, vocabulary, dice.randint(30, 60)), dice.randint(200, 400))


_BURST_S = 0.5
"""Interval between two bursts."""


def _bursts(dice: Random, vocabulary: int) -> Iterator[Request]:
    """Yield bursts that each add four long answers, the background of the next ones."""
    at_s = 0.0
    while True:
        for place in range(20):
            prompt, answer = ((30, 60), (250, 400)) if place < 4 else ((60, 120), (16, 32))
            yield Request(drawn_tokens(dice, vocabulary, dice.randint(*prompt)), dice.randint(*answer), at_s)
        at_s += _BURST_S


def _harmless(dice: Random, vocabulary: int) -> Iterator[Request]:
    while True:
        yield Request(drawn_tokens(dice, vocabulary, dice.randint(30, 60)), dice.randint(40, 80))


WORKLOADS = (
    Workload("mixed", "chats, five shared beginnings, prompts longer than a worker", 150, 30, 24, _mixed),
    Workload("prefixes", "chats on six long beginnings, their turns return", 144, 36, 16, _prefixes),
    Workload("long", "one prompt in twelve is longer than a worker, the others are chats", 84, 12, 16, _long),
    Workload("answers", "short prompts, answers that outgrow the memory", 48, 12, 32, _answers),
    Workload("bursts", "bursts of short requests over long answers", 160, 20, 160, _bursts),
    Workload("harmless", "short prompts that share nothing, and fit", 200, 24, 8, _harmless, is_short=False),
)
