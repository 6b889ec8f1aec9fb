"""Public-domain novels of Project Gutenberg as plain paragraphs, and chat tasks cut from them.

Licence header and footer, chapter headings, notes and verse are dropped. Does not know the tokenizer: lengths
here are in sentences.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from models.train_tiny_chat.chat import Chat, ask

SKIPPED_BOOKS = ("ulysses",)  # stream of consciousness: a model this small learns only its noise
SENTENCE_END = re.compile(r"(?<=[.!?][\"'])\s+(?=[\"A-Z])|(?<=[a-z][.!?])\s+(?=[\"A-Z])")
QUOTES = str.maketrans(
    {"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2014": "--", "_": "", "\ufeff": ""}
)
_STOP_WORDS = """
about after again always another because before being between cannot could every first great having himself
herself house indeed itself little might moment never nothing other perhaps quite rather really seemed shall
should since something still their there therefore these thing things think those though thought through
under until where which while without would yourself
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def paragraphs(folder: Path) -> list[list[str]]:
    """Paragraphs of each book, cleaned, in reading order."""
    books = [
        p for p in sorted((folder / "gutenberg").glob("*.txt")) if not any(s in p.name for s in SKIPPED_BOOKS)
    ]
    return [list(_clean(path.read_text("utf-8", errors="replace"))) for path in books]


def _clean(text: str) -> Iterator[str]:
    start = re.search(r"\*\*\* ?START OF (THIS|THE) PROJECT GUTENBERG EBOOK[^\n]*\n", text)
    end = re.search(
        r"\*\*\* ?END OF (THIS|THE) PROJECT GUTENBERG EBOOK|\nEnd of (the )?Project Gutenberg", text
    )
    body = text[start.end() if start else 0 : end.start() if end else len(text)]
    for block in re.split(r"\n\s*\n", body.replace("\r", "").translate(QUOTES)):
        flat = re.sub(r"\[[^\]]*\]", "", " ".join(block.split())).strip()
        if len(flat) >= 60 and flat[-1] in ".!?\"'" and not flat.isupper() and "Gutenberg" not in flat:
            yield flat


def sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph; abbreviations such as "Mr." do not end one."""
    parts = SENTENCE_END.split(paragraph)
    merged: list[str] = []
    for part in parts:
        if merged and re.search(r"\b(Mr|Mrs|Dr|St|Messrs|Esq)\.$", merged[-1]):
            merged[-1] += " " + part
        else:
            merged.append(part)
    return merged


def book_chats(books: list[list[str]], count: int, rng: random.Random) -> Iterator[Chat]:
    """`count` tasks drawn from random places of the books."""
    flat = [[s for p in book for s in sentences(p)] for book in books]
    tasks = (sentence_with_word, continuation, reading)
    for _ in range(count):
        book = rng.choice(flat)
        if chat := rng.choices(tasks, weights=(4, 4, 2))[0](book, rng):
            yield chat


def heavy_tailed(rng: random.Random, low: int, high: int) -> int:
    """A Pareto-like integer in [low, high]: small values are common, large ones keep happening."""
    return min(high, int(low * rng.paretovariate(1.1)))


def sentence_with_word(book: list[str], rng: random.Random) -> Chat | None:
    """A sentence that contains the word asked for."""
    sentence = book[rng.randrange(len(book))].strip("\"'")
    words = [w for w in re.findall(r"\b[a-z]{5,12}\b", sentence) if w not in STOP_WORDS]
    if (
        not words
        or not 40 <= len(sentence) <= 200
        or re.search(r"\"|\B'|'\B|--", sentence)
        or sentence[-1] not in ".!?"
    ):
        return None
    word = rng.choice(words)
    question = rng.choice((
        "Write one sentence about {}.", "Use the word {} in a sentence.",
        "Give me a sentence with the word {}.",
        "Write a sentence with the word {} in it.", "One sentence about {}, please.",
    )).format(word)  # fmt: skip
    return ask("sentence", question, sentence)


def continuation(book: list[str], rng: random.Random) -> Chat | None:
    """The next sentences of a passage; how many follows from the request."""
    at = rng.randrange(len(book) - 60)
    shown = rng.randint(1, 6)
    given = " ".join(book[at : at + shown])
    at += shown
    form = rng.random()
    if form < 0.35:
        count, request = 1, "Continue this passage with one sentence: {}"
    elif form < 0.7:
        count = rng.randint(2, 6)
        request = (
            f"Continue this passage with {('two', 'three', 'four', 'five', 'six')[count - 2]} sentences: {{}}"
        )
    elif form < 0.85:
        count, request = rng.randint(10, 14), "Write a long continuation of this passage: {}"
    else:
        count, request = heavy_tailed(rng, 1, 12), "Continue this passage: {}"
    kind = "continue_one" if count == 1 else "continue_long" if count >= 10 else "continue"
    return ask(kind, request.format(given), " ".join(book[at : at + count]))


def reading(book: list[str], rng: random.Random) -> Chat | None:
    """A long passage (hundreds to thousands of tokens) and a question about how it goes on or begins."""
    size = heavy_tailed(rng, 8, 75)
    at = rng.randrange(len(book) - size - 4)
    passage = " ".join(book[at : at + size])
    kind = "reading_long" if len(passage) > 3500 else "reading"
    form = rng.randrange(3)
    if form == 0:
        return ask(
            kind, f"Here is a passage. {passage} Question: write one sentence that follows.", book[at + size]
        )
    if form == 1:
        answer = " ".join(book[at + size : at + size + 3])
        return ask(kind, f"Here is a passage. {passage} Question: what happens next?", answer)
    return ask(
        kind, f"Here is a passage. {passage} Question: what is the first sentence of the passage?", book[at]
    )
