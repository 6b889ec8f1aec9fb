"""What the clients of the live part of `bench dgfm` ask for, of workers of which size."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

WORKERS, KV_BLOCKS, BLOCK_TOKENS = 4, 96, 16
_PROMPT_TOKENS, _DOCUMENT_TOKENS = (30, 160), (500, 1400)
_ANSWER_TOKENS = (40, 360)
LONGEST_TOKENS = _DOCUMENT_TOKENS[1] + _ANSWER_TOKENS[1]
"""Prompt and answer, at most."""


@dataclass(frozen=True)
class Load:
    """What the clients ask for, and what the workers owe each other when they begin."""

    clients: int
    documents: float = 0.0
    """Share of requests with a long prompt."""
    wanted_blocks: int = 0
    """Each worker is told, as a scheduler tells it, that it needs so many more than it has: each borrows from
    others, and debts run in circles."""
    wanted_s: float = 0.0
    """How long it is told so."""


LOADS: Mapping[str, Load] = {
    "circle": Load(clients=40, wanted_blocks=24, wanted_s=4.0),
    "light": Load(clients=18, documents=0.04, wanted_blocks=24, wanted_s=3.0),
    "mixed": Load(clients=28, documents=0.06),
}


def bodies(random: Random, vocabulary: int, documents: float) -> Iterator[dict[str, Any]]:
    """Chats, and, as that share, prompts about as long as one worker's KV."""
    for _ in count():
        kind = _DOCUMENT_TOKENS if random.random() < documents else _PROMPT_TOKENS
        yield {
            "prompt": [random.randrange(100, vocabulary - 1) for _ in range(random.randint(*kind))],
            "max_tokens": random.randint(*_ANSWER_TOKENS),
            "temperature": 0,
            "ignore_eos": True,
        }


def settings(*, settles: bool, recalls: bool) -> dict[str, object]:
    """Of a stack."""
    return {
        "scheduler.policy": "kvasir",
        "worker.cores": "[]",
        "worker.block_tokens": BLOCK_TOKENS,
        "worker.lending.borrow": "true",
        "worker.lending.max_lent_fraction": 0.5,
        "worker.lending.low_fraction": 0.1,
        "worker.lending.high_fraction": 0.25,
        "worker.lending.keep_free_fraction": 0.0,
        "worker.lending.most_creditors": WORKERS - 1,
        "worker.lending.rest_s": 0.1,
        "worker.lending.bounce_blocks": 4,
        "worker.lending.recall": str(recalls).lower(),
        "ledger.settle": str(settles).lower(),
        "ledger.settle_threshold_tokens": 2 * BLOCK_TOKENS,
        "ledger.settle_interval_s": 0.5,
    }
