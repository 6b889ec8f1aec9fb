"""Samples whose lengths follow from their prompts, for models to learn."""

import random

from services.predictor.core.length_model import LengthSample
from shared.messages.sequence import pack_tokens

SHORT_WORD, LONG_WORD = 7, 8
SHORT_TOKENS, LONG_TOKENS = 20, 200


def prompt_of(rng: random.Random, word: int) -> bytes:
    """Random tokens with one that decides the length somewhere among the first."""
    tokens = [rng.randrange(100, 160) for _ in range(rng.randint(3, 12))]
    tokens[rng.randrange(3)] = word
    return pack_tokens(tokens)


def samples_of(count: int, seed: int = 0, *, noise: float = 0.1) -> list[LengthSample]:
    """Half around `SHORT_TOKENS`, half around `LONG_TOKENS`."""
    rng = random.Random(seed)
    samples = []
    for number in range(count):
        word, length = ((SHORT_WORD, SHORT_TOKENS), (LONG_WORD, LONG_TOKENS))[number % 2]
        tokens = max(1, round(length * rng.lognormvariate(0.0, noise)))
        samples.append(LengthSample(prompt_of(rng, word), tokens, censored=False))
    return samples
