"""Hand-written small talk, facts and exercises: clean English whose length follows from the request.

Everything here was written for this repository. Does not know books, data sets or the tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from models.train_tiny_chat.chat import Chat, ask
from models.train_tiny_chat.facts import (
    CAPITALS,
    COLOURS,
    DESCRIPTIONS,
    FACTS,
    LISTS,
    NUMBERS,
    OPPOSITES,
    SMALL_TALK,
)
from models.train_tiny_chat.stories import story_chat

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Tiny Chat, a small and friendly model.",
    "You are a kind assistant.",
    "Answer in plain English.", "You are a helpful, honest assistant.",
)  # fmt: skip

ECHO_WORDS = [word for items in LISTS.values() for item in items for word in item.split() if word.islower()]


def small_talk(rng: random.Random) -> Chat:
    """Greetings, identity, thanks, goodbye, feelings."""
    questions, answers = rng.choice(SMALL_TALK)
    return ask("small_talk", _vary(rng.choice(questions), rng), rng.choice(answers))


def fact(rng: random.Random) -> Chat:
    """A simple fact in one sentence."""
    question, answer = rng.choice(FACTS)
    return ask("fact", _vary(question, rng), answer)


def capital(rng: random.Random) -> Chat:
    """Capital cities, as a sentence or in one word."""
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.3:
        return ask("one_word", f"In one word, what is the capital of {country}?", f"{city}.")
    question = rng.choice(
        ("What is the capital of {}?", "Tell me the capital of {}.", "Which city is the capital of {}?")
    )
    return ask("fact", question.format(country), f"The capital of {country} is {city}.")


def opposite(rng: random.Random) -> Chat:
    """Opposites and colours, in one word or one sentence."""
    table, question, answer = rng.choice((
        (OPPOSITES, "What is the opposite of {}?", "The opposite of {} is {}."),
        (COLOURS, "What colour is {}?", "{} is {}."),
    ))  # fmt: skip
    key, value = rng.choice(list(table.items()))
    if rng.random() < 0.4:
        lead = rng.choice(("In one word: {}", "Answer in one word. {}", "{} Answer in one word."))
        return ask("one_word", lead.format(question.format(key)), f"{value.capitalize()}.")
    sentence = answer.format(key, value)
    return ask("fact", question.format(key), sentence[0].upper() + sentence[1:])


def sums(rng: random.Random) -> Chat:
    """Addition and subtraction of small numbers."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        return ask(
            "sum",
            rng.choice(("What is {} + {}?", "How much is {} plus {}?")).format(a, b),
            f"{a} + {b} = {a + b}.",
        )
    a, b = max(a, b), min(a, b)
    return ask(
        "sum",
        rng.choice(("What is {} - {}?", "How much is {} minus {}?")).format(a, b),
        f"{a} - {b} = {a - b}.",
    )


def counting(rng: random.Random) -> Chat:
    """Counts up to a number from 2 to 60; the answer's length is in the question."""
    last = min(60, int(2 * rng.paretovariate(0.7)))
    question = rng.choice(
        ("Count from 1 to {}.", "Count to {}.", "Please count up to {}.", "Can you count to {}?")
    )
    return ask("count", question.format(last), ", ".join(map(str, range(1, last + 1))) + ".")


def listing(rng: random.Random) -> Chat:
    """A list with the number of items asked for."""
    noun, items = rng.choice(list(LISTS.items()))
    count = rng.randint(2, min(12, len(items)))
    chosen = rng.sample(items, count)
    asked = rng.choice((str(count), NUMBERS[count]))
    if rng.random() < 0.5:
        answer = f"Here are {asked} {noun}: " + ", ".join(chosen[:-1]) + f" and {chosen[-1]}."
        return ask("list", rng.choice(("Name {} {}.", "Tell me {} {}.")).format(asked, noun), answer)
    lines = "\n".join(f"{i}. {item[0].upper()}{item[1:]}" for i, item in enumerate(chosen, 1))
    return ask("list", rng.choice(("List {} {}.", "Give me a list of {} {}.")).format(asked, noun), lines)


def spelling(rng: random.Random) -> Chat:
    """Spells a word letter by letter."""
    word = rng.choice([w for items in LISTS.values() for w in items if w.isalpha()])
    question = rng.choice(("Spell the word {}.", "How do you spell {}?")).format(word)
    return ask("spell", question, ", ".join(word.upper()) + ".")


def describe(rng: random.Random) -> Chat:
    """One to eight sentences about a thing, as many as asked for."""
    noun, items = rng.choice(list(LISTS.items()))
    item = rng.choice(items)
    count = min(8, int(rng.paretovariate(0.7)))
    name = f"{item[0].upper()}{item[1:]}"
    text = [rng.choice(choices).format(name=name, noun=noun) for choices in DESCRIPTIONS[:count]]
    question = rng.choice(
        ("Write {} about {}.", "Tell me about {1} in {0}.", "Describe {1} in {0}.", "Say {} about {}.")
    )
    unit = "one sentence" if count == 1 else f"{NUMBERS[count]} sentences"
    if count == 8 and rng.random() < 0.6:
        unit = rng.choice(("a long text", "many sentences", "a long paragraph"))
    return ask("describe", question.format(unit, item), " ".join(text))


def echo(rng: random.Random) -> Chat:
    """Says back what was said."""
    text = (
        rng.choice(FACTS)[1]
        if rng.random() < 0.6
        else " ".join(rng.sample(ECHO_WORDS, rng.randint(2, 8))) + "."
    )
    question = rng.choice(("Repeat after me: {}", "Say this again: {}", "Repeat this: {}")).format(text)
    return ask("echo", question, text)


TASKS: tuple[tuple[Callable[[random.Random], Chat], float], ...] = (
    (small_talk, 5.0), (fact, 4.0), (capital, 2.0), (opposite, 2.0), (sums, 2.0), (counting, 1.5),
    (listing, 2.5),    (spelling, 1.0), (describe, 2.5), (echo, 1.0),
    (story_chat, 1.0),
)  # fmt: skip


def template_chat(rng: random.Random) -> Chat:
    """One exercise, or a conversation of up to five of them, sometimes under a system prompt."""
    rounds = min(5, int(rng.paretovariate(1.6)))
    chats = [rng.choices([t for t, _ in TASKS], [w for _, w in TASKS])[0](rng) for _ in range(rounds)]
    turns = tuple(turn for chat in chats for turn in chat.turns)
    if rng.random() < 0.2:
        turns = (("system", rng.choice(SYSTEM_PROMPTS)), *turns)
    return Chat(chats[-1].kind, turns)


def _vary(question: str, rng: random.Random) -> str:
    form = rng.random()
    if form < 0.15:
        return question.lower()
    if form < 0.25:
        return question.rstrip("?.!")
    if form < 0.3:
        return "Please tell me: " + question
    return question
