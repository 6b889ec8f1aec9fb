"""Requests as chains of block names: a recorded trace, or one generated from stated distributions.

A trace knows which blocks requests share, not their text. Recorded: Mooncake's conversation trace (FAST '25),
blocks of 512 tokens, its last block counted as whole, as Mooncake counts.
"""

import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.blocks import HASH_BYTES, BlockHash

Chain = tuple[BlockHash, ...]
"""One prompt's blocks."""


def read_mooncake(file: Path) -> list[Chain]:
    """In order of arrival. Raises ValueError when a line is no request."""
    chains: list[Chain] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            chains.append(tuple(_name(block) for block in json.loads(line)["hash_ids"]))
        except (KeyError, TypeError, OverflowError, json.JSONDecodeError) as error:
            raise ValueError(f"{file.name}, line {number}: no request with hash_ids: {error!r}") from error
    return chains


@dataclass(frozen=True, slots=True)
class Conversations:
    """Chats over a few shared system prompts; lengths in blocks, times in mean gaps between requests.

    Log-normal by median and σ. `single` of them end after their first turn, the others go on for an
    exponential number of turns. Each turn adds the user's text and the answer before it.
    """

    system_prompts: int = 20
    system_blocks: int = 4
    single: float = 0.4
    turns: float = 6.0
    first_blocks: tuple[float, float] = (8.0, 1.2)
    turn_blocks: tuple[float, float] = (3.0, 1.2)
    think: tuple[float, float] = (400.0, 1.0)


PRESETS = {
    "chats": Conversations(),
    "long-chats": Conversations(100, 4, 0.1, 12.0, (8.0, 1.2), (3.0, 1.2), (100.0, 1.0)),
}
"""The second has more turns, sooner after each other, and hardly a conversation that ends at once."""


def generate(shape: Conversations, requests: int, seed: random.Random) -> list[Chain]:
    """So many requests in order of arrival."""
    fresh = shape.system_prompts * shape.system_blocks
    waiting: list[tuple[float, int, bool, int, list[int]]] = []
    """When, number, whether it is the first turn, turns left, blocks so far."""
    chains: list[Chain] = []
    now, started = 0.0, 0
    per_chat = shape.single + (1 - shape.single) * (1 + shape.turns)
    while len(chains) < requests:
        if not waiting or waiting[0][0] > now:
            system = min(int(seed.paretovariate(0.8)), shape.system_prompts) - 1
            blocks = list(range(system * shape.system_blocks, (system + 1) * shape.system_blocks))
            turns = 1 if seed.random() < shape.single else 1 + int(seed.expovariate(1 / shape.turns))
            started += 1
            heapq.heappush(waiting, (now, started, True, turns, blocks))
            now += seed.expovariate(1 / per_chat)
            continue
        at, number, first, turns, blocks = heapq.heappop(waiting)
        median, sigma = shape.first_blocks if first else shape.turn_blocks
        added = max(1, round(median * seed.lognormvariate(0, sigma)))
        blocks = [*blocks, *range(fresh, fresh + added)]
        fresh += added
        chains.append(tuple(map(_name, blocks)))
        if turns > 1:
            again = at + shape.think[0] * seed.lognormvariate(0, shape.think[1])
            heapq.heappush(waiting, (again, number, False, turns - 1, blocks))
    return chains


def infinite_hit_rate(trace: Sequence[Chain]) -> float:
    """Share of blocks that a cache which forgets nothing would find."""
    asked = sum(map(len, trace))
    return 1 - len({name for chain in trace for name in chain}) / asked if asked else 0.0


def _name(block: int) -> BlockHash:
    return block.to_bytes(HASH_BYTES, "little")
