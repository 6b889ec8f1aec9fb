"""Ends a constrained answer inside its grammar while it still has tokens for that.

Cut off at `max_tokens`, a JSON text is worthless. So when what is left is little more than what it takes to
close every string, list and object that is open, only tokens that do so are allowed. For JSON these are
quotes and brackets, for everything else where the grammar lets the answer end; the grammar stays in force.
Whether an answer is closing depends on its tokens and limit alone, so it closes in the same way wherever it
goes on.
"""

from collections.abc import Callable
from math import inf
from time import thread_time

import numpy as np

from shared.grammars import GrammarMatcher, Grammars, Words, words_of

_MOST_TOKENS = 512
"""What takes longer to close is not closed."""
_MOST_CPU_S = 0.1
"""What takes longer to find a way to close is not closed: masks of some grammars take milliseconds each."""
_OF_STRINGS = tuple(bytes([letter]) for letter in b"bcdghijkmopqvwxyzBCDGHIJKMOPQVWXYZ")
"""Letters with which neither true, false nor null begins: where they may follow, a string is open."""
_MOST_LOOKS = 8
"""So often a way to close is looked for one token ahead, and not found, before that is given up."""
_OPENING = (b"{", b"[", b" {", b" [")
"""Taken only where nothing else is allowed: each opens what has to be closed."""


class Closer:
    """Of one vocabulary."""

    def __init__(self, grammars: Grammars) -> None:
        texts = grammars.token_bytes()
        self._words_per_row = words_of(grammars.vocabulary)
        self._first = np.array([text[0] if text else 0 for text in texts], dtype=np.uint8)
        self._length = np.array([len(text) for text in texts], dtype=np.int64)
        self._is_list = [text.endswith(b"[") for text in texts]
        self._ends = self._of({*grammars.end_token_ids}.__contains__, len(texts))
        self._letters = self._of(lambda token: texts[token][:1] in _OF_STRINGS, len(texts))
        self._digits = self._of(lambda token: texts[token][:1].isdigit(), len(texts))
        self._quotes = self._of(lambda token: texts[token] == b'"', len(texts))
        self._singles = self._of(lambda token: len(texts[token]) == 1 and texts[token].isalnum(), len(texts))
        self._brackets = self._of(lambda token: texts[token] in (b"}", b"]"), len(texts))
        self._others = self._of(lambda token: not texts[token].startswith(_OPENING), len(texts))
        self._commas = self._of(lambda token: texts[token] in (b",", b":"), len(texts))

    def unit_tokens(self, matcher: GrammarMatcher) -> int:
        """By about so much it may take longer to close an answer from one look at it to the next: an item of
        each list, another call. 0: it cannot be closed. `matcher` is at the beginning."""
        until_s = thread_time() + _MOST_CPU_S
        found = self._tokens_to_close(matcher, _MOST_TOKENS, fills_lists=True, until_s=until_s)
        return found if found < _MOST_TOKENS else 0

    def is_due(self, matcher: GrammarMatcher, left_tokens: int, unit_tokens: int, every_tokens: int) -> bool:
        """Whether an answer that stands here should begin to close; it is looked at every so many tokens."""
        margin = unit_tokens + 2 * every_tokens
        return self._tokens_to_close(matcher, min(left_tokens, _MOST_TOKENS)) + margin >= left_tokens

    def restrict(self, words: Words, matcher: GrammarMatcher | None = None) -> bool:
        """Of what the grammar allows, leave what leads to the end; in place. Where a string may not end yet,
        `matcher`, which stands there, is asked after which letter it may; False if after none."""
        if _has(words, self._ends):
            words &= self._ends
        elif _has(words, self._letters):
            if _has(words, self._quotes):
                words &= self._quotes
                return True
            before = None if matcher is None else self._before_a_quote(words, matcher)
            if before is not None:
                words[:] = 0
                words[before >> 5] = np.uint32(1 << (before & 31))
                return True
            if _has(words, ~self._digits):
                words &= ~self._digits
            return False
        else:
            for kind in (self._brackets, self._quotes, self._commas):
                if _has(words, kind):
                    words &= kind
                    return True
            if _has(words, self._others):
                words &= self._others
            self._shorten(words)
        return True

    def _before_a_quote(self, words: Words, matcher: GrammarMatcher) -> int | None:
        """A letter or digit after which a string may end."""
        following = np.zeros(self._words_per_row, dtype=np.uint32)
        for token in _ids(words & self._singles).tolist():
            follower = matcher.copy()
            follower.accept(token)
            follower.mask(following)
            if _has(following, self._quotes):
                return int(token)
        return None

    def _shorten(self, words: Words) -> None:
        """Where the text is given, leave the token that has most of it."""
        ids = _ids(words)
        if len(ids) and (self._first[ids] == self._first[ids[0]]).all():
            longest = ids[self._length[ids].argmax()]
            words[:] = 0
            words[longest >> 5] = np.uint32(1 << (longest & 31))

    def _tokens_to_close(
        self, matcher: GrammarMatcher, most: int, *, fills_lists: bool = False, until_s: float = inf
    ) -> int:
        """Until an end token, where each step takes what the grammar forces, or the longest token that
        `restrict` leaves."""
        follower = matcher.copy()
        words, is_list = np.zeros(self._words_per_row, dtype=np.uint32), False
        count = looks = 0
        while count < most and thread_time() < until_s:
            if forced := follower.forced():
                is_list = self._is_list[forced[-1]]
                count += len(forced)
                for token in forced:
                    follower.accept(token)
                continue
            follower.mask(words)
            if not words.any() or _has(words, self._ends):
                return count + 1
            if fills_lists and is_list and _has(words, ~self._brackets):
                words &= ~self._brackets
            looks += not self.restrict(words, follower if looks < _MOST_LOOKS else None)
            ids = _ids(words)
            longest = ids[self._length[ids] == self._length[ids].max()]
            token = int(longest[count % len(longest)])
            is_list = self._is_list[token]
            follower.accept(token)
            count += 1
        return most

    def _of(self, belongs: Callable[[int], bool], tokens: int) -> Words:
        bits = np.zeros(self._words_per_row * 32, dtype=np.uint8)
        bits[: min(tokens, len(bits))] = [belongs(token) for token in range(tokens)]
        return np.packbits(bits, bitorder="little").view(np.uint32)


def _ids(words: Words) -> np.typing.NDArray[np.int64]:
    """Tokens whose bit is set."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def _has(words: Words, kind: Words) -> bool:
    return bool((words & kind).any())
