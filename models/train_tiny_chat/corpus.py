"""Builds the training text: book text for language, chats for behaviour, and a held-out part of both.

Held out are about 5 % of the AlpacaEval prompts, of the GSM8K questions and of every book (its end), and
freshly drawn exercises. Does not know the tokenizer. `python -m models.train_tiny_chat.corpus` prints a
sample.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from models.train_tiny_chat.answers import alpaca_chats, gsm8k_chats
from models.train_tiny_chat.books import book_chats, paragraphs
from models.train_tiny_chat.chat import Chat, data_folder
from models.train_tiny_chat.stories import story_chat
from models.train_tiny_chat.templates import template_chat

HELD_OUT = 0.05
BOOK_CHATS, TEMPLATE_CHATS, STORY_CHATS = 10_000, 24_000, 9_000


@dataclass(frozen=True)
class Corpus:
    """Text of one split: `books` are paragraphs in reading order, `chats` are shuffled."""

    books: list[list[str]]
    chats: list[Chat]


def is_held_out(key: str) -> bool:
    """A stable draw: the same prompts are held out in every run."""
    return zlib.crc32(key.encode()) % 1000 < HELD_OUT * 1000


def build_corpus(folder: Path, seed: int) -> tuple[Corpus, Corpus]:
    """(training, held-out) corpora from the data folder."""
    rng = random.Random(seed)
    books = paragraphs(folder)
    cuts = [int(len(book) * (1 - HELD_OUT)) for book in books]
    train_books = [book[:at] for book, at in zip(books, cuts, strict=True)]
    held_books = [book[at:] for book, at in zip(books, cuts, strict=True)]
    train = list(book_chats(train_books, BOOK_CHATS, rng))
    held = list(book_chats(held_books, BOOK_CHATS // 40, rng))
    for source in (alpaca_chats(folder, rng), gsm8k_chats(folder, rng)):
        for key, chat in source:
            (held if is_held_out(key) else train).append(chat)
    for make, count in ((template_chat, TEMPLATE_CHATS), (story_chat, STORY_CHATS)):
        train += [make(rng) for _ in range(count)]
    seen = {chat.turns for chat in train}
    fresh = [make(rng) for make in (template_chat, story_chat) for _ in range(600)]
    held += [chat for chat in fresh if chat.turns not in seen]
    rng.shuffle(train)
    rng.shuffle(held)
    return Corpus(train_books, train), Corpus(held_books, held)


def main() -> None:
    """Prints sizes and one chat of each kind."""
    train, held = build_corpus(data_folder(), seed=0)
    for name, split in (("train", train), ("held out", held)):
        chars = Counter[str]()
        for chat in split.chats:
            chars[chat.kind] += sum(len(text) for _, text in chat.turns)
        print(name, "book characters:", sum(len(p) for book in split.books for p in book))
        print(name, "chats:", dict(Counter(chat.kind for chat in split.chats)))
        print(name, "chat characters:", dict(chars), sum(chars.values()))
    for chat in {chat.kind: chat for chat in train.chats}.values():
        print(f"\n[{chat.kind}] {chat.prompt()[-400:]}\n  -> {chat.answer()}")


if __name__ == "__main__":
    main()
