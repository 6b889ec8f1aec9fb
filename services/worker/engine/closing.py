"""Closes a constrained answer within its grammar before it reaches `max_tokens`.

When few tokens are left, the mask allows only tokens that close the open strings, lists and objects. The
decision depends on the answer's tokens and limit alone, so it is the same on every worker."""

from math import inf
from time import thread_time

import numpy as np

from shared.grammars import GrammarMatcher, Grammars, Words, words_of

_MOST_TOKENS = 512
"""Most tokens to close an answer; longer ones are not closed."""
_MOST_CPU_S = 0.1
"""CPU seconds to search for a way to close; masks of some grammars take milliseconds each."""
_OF_STRINGS = tuple(bytes([letter]) for letter in b"bcdghijkmopqvwxyzBCDGHIJKMOPQVWXYZ")
"""Letters that begin none of true, false and null: if one is allowed, a string is open."""
_MOST_LOOKS = 8
"""Failed searches one token ahead after which that search is given up."""
_OPENING = (b"{", b"[", b" {", b" [")
"""Tokens used only if nothing else is allowed, because each opens an item to close."""


class Closer:
    """Token masks of one vocabulary that lead a grammar to its end."""

    def __init__(self, grammars: Grammars) -> None:
        texts = grammars.token_bytes()
        self._words_per_row = words_of(grammars.vocabulary)
        self._first = np.array([text[0] if text else 0 for text in texts], dtype=np.uint8)
        self._length = np.array([len(text) for text in texts], dtype=np.int64)
        self._is_list = [text.endswith(b"[") for text in texts]
        ends = {*grammars.end_token_ids}
        self._ends = self._of([token in ends for token in range(len(texts))])
        self._letters = self._of([text[:1] in _OF_STRINGS for text in texts])
        self._digits = self._of([text[:1].isdigit() for text in texts])
        self._quotes = self._of([text == b'"' for text in texts])
        self._singles = self._of([len(text) == 1 and text.isalnum() for text in texts])
        self._brackets = self._of([text in (b"}", b"]") for text in texts])
        self._others = self._of([not text.startswith(_OPENING) for text in texts])
        self._commas = self._of([text in (b",", b":") for text in texts])

    def unit_tokens(self, matcher: GrammarMatcher) -> int:
        """Return about how many tokens one more list item or call adds to closing; 0: cannot be closed.

        `matcher` is at the start of its grammar."""
        until_s = thread_time() + _MOST_CPU_S
        found = self._tokens_to_close(matcher, _MOST_TOKENS, fills_lists=True, until_s=until_s)
        return found if found < _MOST_TOKENS else 0

    def is_due(self, matcher: GrammarMatcher, left_tokens: int, unit_tokens: int, every_tokens: int) -> bool:
        """Return whether an answer at `matcher` should begin to close, if checked every `every_tokens`."""
        margin = unit_tokens + 2 * every_tokens
        return self._tokens_to_close(matcher, min(left_tokens, _MOST_TOKENS)) + margin >= left_tokens

    def restrict(self, words: Words, matcher: GrammarMatcher | None = None) -> bool:
        """Reduce the mask `words` to tokens that lead to the end, in place.

        Inside a string that may not end yet, `matcher` finds a letter after which it may. Return False if
        there is none."""
        if _has(words, self._ends):
            words &= self._ends
        elif _has(words, self._letters):
            if _has(words, self._quotes):
                words &= self._quotes
                return True
            before = None if matcher is None else self._before_a_quote(words, matcher)
            if before is not None:
                _keep_only(words, before)
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
            ids = _ids(words)
            if len(ids) and (self._first[ids] == self._first[ids[0]]).all():
                _keep_only(words, int(ids[self._length[ids].argmax()]))  # All begin with the same byte.
        return True

    def _before_a_quote(self, words: Words, matcher: GrammarMatcher) -> int | None:
        """Return a letter or digit after which the string may end, or None."""
        following = np.zeros(self._words_per_row, dtype=np.uint32)
        for token in _ids(words & self._singles).tolist():
            follower = matcher.copy()
            follower.accept(token)
            follower.mask(following)
            if _has(following, self._quotes):
                return int(token)
        return None

    def _tokens_to_close(
        self, matcher: GrammarMatcher, most: int, *, fills_lists: bool = False, until_s: float = inf
    ) -> int:
        """Return the tokens to an end token, via forced tokens or the longest one that `restrict` leaves."""
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

    def _of(self, belongs: list[bool]) -> Words:
        """Return the mask of the tokens that belong to a kind."""
        bits = np.zeros(self._words_per_row * 32, dtype=np.uint8)
        bits[: len(belongs)] = belongs[: len(bits)]
        return np.packbits(bits, bitorder="little").view(np.uint32)


def _keep_only(words: Words, token: int) -> None:
    words[:] = 0
    words[token >> 5] = np.uint32(1 << (token & 31))


def _ids(words: Words) -> np.typing.NDArray[np.int64]:
    """Return the ids of the tokens whose bit is set."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def _has(words: Words, kind: Words) -> bool:
    return bool((words & kind).any())
