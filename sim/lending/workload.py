"""A long mixed workload per worker: many chats and a few very long documents. Pure, seeded."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LendingJob:
    """One request with its true answer length."""

    number: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Chat lengths are log-normal, document lengths log-uniform."""

    long_share: float = 0.01
    long_least_tokens: int = 8_000
    long_most_tokens: int = 200_000
    long_output_tokens: tuple[int, int] = (300, 3_000)
    chat_prompt_median: int = 300
    chat_output_median: int = 250
    chat_sigma: float = 0.9


def jobs(mix: Mix, seed: int, worker: int) -> Iterator[LendingJob]:
    """Yield the endless jobs of one worker."""
    rng = random.Random(f"{seed}/{worker}")
    number = 0
    while True:
        number += 1
        if rng.random() < mix.long_share:
            low, high = math.log(mix.long_least_tokens), math.log(mix.long_most_tokens)
            yield LendingJob(
                number, int(math.exp(rng.uniform(low, high))), rng.randint(*mix.long_output_tokens)
            )
        else:
            prompt = min(8_000, 1 + int(rng.lognormvariate(math.log(mix.chat_prompt_median), mix.chat_sigma)))
            output = min(2_000, 1 + int(rng.lognormvariate(math.log(mix.chat_output_median), mix.chat_sigma)))
            yield LendingJob(number, prompt, output)
