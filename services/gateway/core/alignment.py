"""Which tokens' text has been shown: log-probabilities leave with the piece that ends their token.

Pure; counts characters. Knows neither what is in the text nor how log-probabilities are written.
"""

from collections import deque
from dataclasses import dataclass

from shared.messages.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of the shown answer."""

    token: int
    logprobs: TokenLogprobs
    offset: int
    """Characters of the answer before the first one of this token."""


class Alignment:
    """Of one answer.

    Tokens that are parts of one character share its place; a token that shows nothing shares the next one's.
    """

    def __init__(self) -> None:
        self._unplaced: list[tuple[int, TokenLogprobs]] = []
        self._placed: deque[tuple[PlacedToken, int]] = deque()
        """With the offset of the character after it."""
        self._read_chars = 0
        self._shown_chars = 0

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """The next token; one without log-probabilities will not be listed."""
        if logprobs is not None:
            self._unplaced.append((token, logprobs))

    def on_text(self, chars: int) -> None:
        """So many characters came of the tokens since the last call."""
        if chars == 0:
            return
        start, self._read_chars = self._read_chars, self._read_chars + chars
        for token, logprobs in self._unplaced:
            self._placed.append((PlacedToken(token, logprobs, start), self._read_chars))
        self._unplaced.clear()

    def on_shown(self, chars: int) -> tuple[PlacedToken, ...]:
        """So many characters more are shown. Returns the tokens they complete."""
        self._shown_chars += chars
        shown = []
        while self._placed and self._placed[0][1] <= self._shown_chars:
            shown.append(self._placed.popleft()[0])
        return tuple(shown)

    def on_end(self, *, is_cut: bool) -> tuple[PlacedToken, ...]:
        """Nothing more is shown. Returns what is left: after a cut, only tokens that were shown in part."""
        rest = [placed for placed, _ in self._placed if not is_cut or placed.offset < self._shown_chars]
        if not is_cut:
            rest += [PlacedToken(token, logprobs, self._read_chars) for token, logprobs in self._unplaced]
        self._placed.clear()
        self._unplaced.clear()
        return tuple(rest)

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts contradict each other."""
        assert 0 <= self._shown_chars <= self._read_chars
        ends = [end for _, end in self._placed]
        assert ends == sorted(ends)
        assert all(self._shown_chars < end <= self._read_chars for end in ends)
        assert all(placed.offset < end for placed, end in self._placed)
