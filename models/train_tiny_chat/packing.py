"""Turns texts into rows of tokens: whole chats side by side, the gap behind the last one filled with book
text.

A row holds `row_tokens` inputs and as many targets (the next token, or -100 where no loss is wanted).
Documents are separated by the bos token only; attention may look across, the model learns that nothing useful
is there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.train_tiny_chat.chat import ASSISTANT, BOS, END, Chat
from models.train_tiny_chat.tokenizer import token_id

MAX_ANSWER_TOKENS = 400
IGNORED = -100
_LOOKAHEAD = 12


@dataclass(frozen=True)
class EncodedChat:
    """Tokens of a chat; `is_answer[i]` is true where token i belongs to an assistant's turn or ends it."""

    tokens: list[int]
    is_answer: list[bool]


def fit_answer(text: str, tokenizer: Tokenizer, max_tokens: int) -> str | None:
    """`text` cut at the last sentence or line end within `max_tokens`, end token included; None if nothing
    fits.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if len(encoding.ids) < max_tokens:
        return text
    limit = encoding.offsets[max_tokens - 2][1]
    ends = [m.end() for m in re.finditer(r"[.!?][\"']?(?=\s)|\n(?=\n)", text) if m.end() <= limit]
    return text[: ends[-1]].strip() if ends else None


def encode_chat(chat: Chat, tokenizer: Tokenizer) -> EncodedChat | None:
    """The chat as tokens, its last answer cut to MAX_ANSWER_TOKENS; None where that leaves nothing."""
    answer = fit_answer(chat.answer(), tokenizer, MAX_ANSWER_TOKENS)
    if not answer:
        return None
    tokens, is_answer = [token_id(tokenizer, BOS)], [False]
    for role, text in (*chat.turns[:-1], ("assistant", answer)):
        marker = f"<|{role}|>"
        body = tokenizer.encode(text.strip() + END, add_special_tokens=False).ids
        tokens += [token_id(tokenizer, marker), *body]
        is_answer += [False, *([marker == ASSISTANT] * len(body))]
    return EncodedChat(tokens, is_answer)


def encode_books(books: list[list[str]], tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """One stream of book pieces in random order: each is bos, a heavy-tailed number of paragraphs, end."""
    bos, end = token_id(tokenizer, BOS), token_id(tokenizer, END)
    pieces: list[str] = []
    for book in books:
        at = 0
        while at < len(book):
            count = min(30, int(3 * rng.paretovariate(1.0)))
            pieces.append("\n\n".join(book[at : at + count]))
            at += count
    rng.shuffle(pieces)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False):
        stream += [bos, *encoding.ids, end]
    return stream


class RowPacker:
    """Endless rows from a book stream and a list of chats; deterministic for a given seed."""

    def __init__(self, books: list[int], chats: list[EncodedChat], seed: int) -> None:
        self._books = books
        self._chats = chats
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Draws a new order of the chats and a new place in the books."""
        self._rng = random.Random(seed)
        self._book_at = self._rng.randrange(len(self._books))
        self._queue = self._shuffled()
        self._waiting: list[EncodedChat] = []

    def batch(
        self, rows: int, row_tokens: int, chat_share: float, answers_only: bool
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets), int64 [rows, row_tokens]; `chat_share` is the chance that a row holds chats."""
        made = [self._row(row_tokens + 1, self._rng.random() < chat_share, answers_only) for _ in range(rows)]
        tokens = torch.tensor([row for row, _ in made])
        wanted = torch.tensor([mask for _, mask in made])
        return tokens[:, :-1], tokens[:, 1:].masked_fill(~wanted[:, 1:], IGNORED)

    def _row(self, size: int, with_chats: bool, answers_only: bool) -> tuple[list[int], list[bool]]:
        tokens: list[int] = []
        wanted: list[bool] = []
        while with_chats and (chat := self._next_chat(size - len(tokens), size)):
            tokens += chat.tokens
            wanted += chat.is_answer if answers_only else [True] * len(chat.tokens)
        gap = size - len(tokens)
        tokens += self._take_book(gap)
        return tokens, wanted + [not (answers_only and with_chats)] * gap

    def _next_chat(self, room: int, size: int) -> EncodedChat | None:
        for index, chat in enumerate(self._waiting):
            if len(chat.tokens) <= room:
                return self._waiting.pop(index)
        while len(self._waiting) < _LOOKAHEAD:
            chat = next(self._queue)
            if len(chat.tokens) <= room:
                return chat
            if len(chat.tokens) <= size:
                self._waiting.append(chat)
        return None

    def _take_book(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            piece = self._books[self._book_at : self._book_at + count - len(taken)]
            self._book_at = (self._book_at + len(piece)) % len(self._books)
            taken += piece
        return taken

    def _shuffled(self) -> Iterator[EncodedChat]:
        while True:
            order = list(self._chats)
            self._rng.shuffle(order)
            yield from order
