"""Prompts of mixed kind and length for tests of the whole stack, made of the project's own words."""

import random

from tests.stack.client import Question

ASKED = (
    "Hello! Who are you?",
    "What can you do?",
    "Write one sentence about a river.",
    "Tell me a short story about a dog.",
    "Tell me a long story about a journey.",
    "How can I sleep better at night?",
    "What are the days of the week?",
    "Tom has 3 apples and buys 5 more. How many apples does he have?",
    "Explain why the sky is blue.",
    "Give me three tips for writing a letter.",
    "Thank you very much!",
    "What is the best way to learn to cook?",
)
_WORDS = (
    "the morning was cold and the old house stood silent beside the road while a carriage came slowly up "
    "the hill and the children ran to the gate to see who had come so early with letters from the city"
).split()


def passage(words: int, rng: random.Random) -> str:
    """About `words` words of prose-like filler, in sentences."""
    sentences = []
    while words > 0:
        length = min(words, rng.randint(6, 14))
        sentences.append(" ".join(rng.choices(_WORDS, k=length)).capitalize() + ".")
        words -= length
    return " ".join(sentences)


STORIES = tuple(f"Tell me a long story about {whom}." for whom in ("a journey", "a king", "Lucy", "a dog"))
"""Answered with some 250 tokens."""


def mixed(count: int, *, longest_words: int, seed: int = 0, asked: tuple[str, ...] = ASKED) -> list[str]:
    """`count` prompts: a third bare questions, the rest behind a passage of a log-spread length."""
    rng = random.Random(seed)
    prompts = []
    for index in range(count):
        question = asked[index % len(asked)]
        words = 0 if index % 3 == 0 else int(20 * (longest_words / 20) ** (index / count))
        prompts.append(f"{passage(words, rng)}\n\n{question}" if words else question)
    return prompts


def long_questions(
    count: int, *, least_tokens: int, step_tokens: int, longest_words: int, seed: int
) -> list[Question]:
    """Greedy and seeded in turn, each `step_tokens` longer than the last, whatever is said."""
    sampled = {"temperature": 0.8, "top_p": 0.9}
    return [
        Question(
            prompt,
            {
                "max_tokens": least_tokens + step_tokens * index,
                "ignore_eos": True,
                **({"temperature": 0} if index % 2 == 0 else {**sampled, "seed": index}),
            },
        )
        for index, prompt in enumerate(mixed(count, longest_words=longest_words, seed=seed))
    ]
