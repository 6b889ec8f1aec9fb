"""Turns one choice's tokens into pieces of text, cut at a stop string. Text is released once no stop string
can begin in it. Log-probabilities go with the piece that completes their token."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from services.gateway.core.stream import Stream
from services.gateway.parts.items import undecided
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenLogprobs
from shared.messages.values import MOST_COUNT


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of the answer and its place in the text."""

    token: int
    logprobs: TokenLogprobs | None
    """None for a prompt's first token."""
    offset: int
    """Number of characters before this token."""


class Alignment:
    """Tracks which tokens of an answer have been shown in full. Tokens that share one character have the same
    offset; a token without text takes the next token's."""

    def __init__(self, chars: int = 0) -> None:
        """`chars` is the offset of the first token."""
        self._unplaced: list[tuple[int, TokenLogprobs]] = []
        self._placed: deque[tuple[PlacedToken, int]] = deque()
        self._read_chars = self._shown_chars = chars

    def on_token(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add the next token; one without log-probabilities is not listed."""
        if logprobs is not None:
            self._unplaced.append((token, logprobs))

    def on_text(self, chars: int) -> None:
        """Note that the tokens since the last call decoded to `chars` characters."""
        if chars == 0:
            return
        start, self._read_chars = self._read_chars, self._read_chars + chars
        for token, logprobs in self._unplaced:
            self._placed.append((PlacedToken(token, logprobs, start), self._read_chars))
        self._unplaced.clear()

    def on_shown(self, chars: int) -> tuple[PlacedToken, ...]:
        """Note `chars` more shown characters; return the tokens they complete."""
        self._shown_chars += chars
        shown = []
        while self._placed and self._placed[0][1] <= self._shown_chars:
            shown.append(self._placed.popleft()[0])
        return tuple(shown)

    def on_end(self, *, is_cut: bool) -> tuple[PlacedToken, ...]:
        """Return the remaining tokens; after a cut, only those shown in part."""
        rest = [placed for placed, _ in self._placed if not is_cut or placed.offset < self._shown_chars]
        if not is_cut:
            rest += [PlacedToken(token, logprobs, self._read_chars) for token, logprobs in self._unplaced]
        self._placed.clear()
        self._unplaced.clear()
        return tuple(rest)

    def check_integrity(self) -> None:
        assert 0 <= self._shown_chars <= self._read_chars
        ends = [end for _, end in self._placed]
        assert ends == sorted(ends)
        assert all(self._shown_chars < end <= self._read_chars for end in ends)
        assert all(placed.offset < end for placed, end in self._placed)


class StopMatcher:
    """Cuts a growing text before the first stop string, or after it with `includes`. Holds back only text
    that may become a stop string."""

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        self._includes = includes
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, is_early: bool = False) -> str:
        """Return the text that can be shown now; set `matched` when a stop string is complete. With
        `is_early`, stop strings that this text completes do not count."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        window = self._held + text
        found = [(at, stop) for stop in self._stops if not is_early and (at := window.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return window[: at + (len(self.matched) if self._includes else 0)]
        keep = undecided(window, self._stops)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """Return the held text, when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


class TokenTexts(dict[int, str | None]):
    """Text of each token, where it is the same after any complete text; None for other tokens. A byte-level
    decoder joins the tokens' bytes, so it holds for every token of whole characters."""

    def __init__(self, tokenizer: Tokenizer, *, shows_special: bool) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self.are_joined = isinstance(tokenizer.decoder, ByteLevel)

    def __missing__(self, token: int) -> str | None:
        text = decode(self._tokenizer, (token,), shows_special=self._shows_special)
        found = text if self.are_joined and "\ufffd" not in text else None  # no part of a character
        if self._tokenizer.id_to_token(token) is not None:
            self[token] = found
        return found


@lru_cache(maxsize=32)
def token_texts(tokenizer: Tokenizer, shows_special: bool) -> TokenTexts:
    return TokenTexts(tokenizer, shows_special=shows_special)


class Detokenizer:
    """Incremental decoder of one sequence."""

    def __init__(self, tokenizer: Tokenizer, *, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._texts = token_texts(tokenizer, shows_special)
        self._stream = DecodeStream(skip_special_tokens=not shows_special)
        self._tokens: list[int] = []
        """Tokens of an incomplete character, or all if their texts depend on each other."""
        self._shown_chars = 0

    def feed(self, token: int) -> str:
        """Return the text that this token completes; empty inside a character."""
        if not self._tokens and (text := self._texts[token]) is not None:
            return text
        self._tokens.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._shown_chars += len(piece)
        if piece and self._texts.are_joined:
            self._tokens, self._shown_chars = [], 0
        return piece

    def feed_all(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        texts = self._texts
        if not self._tokens and None not in (known := [texts[token] for token in tokens]):
            return "".join(known)  # type: ignore[arg-type]  # for mypy, they may still be None
        return "".join([self.feed(token) for token in tokens])

    def flush(self) -> str:
        """Return the replacement characters for an incomplete last character."""
        rest = decode(self._tokenizer, self._tokens, shows_special=self._shows_special)[self._shown_chars :]
        self._shown_chars += len(rest)
        return rest


def decode(tokenizer: Tokenizer, tokens: Sequence[int], *, shows_special: bool = False) -> str:
    """Decode all tokens at once, without special tokens unless `shows_special`."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=not shows_special)
    return text


class TextPiece(NamedTuple):
    """New text of one choice; the last piece has a `finish_reason`."""

    text: str
    finish_reason: FinishReason | None
    tokens: tuple[PlacedToken, ...] = ()
    """Tokens that end in this piece, if log-probabilities are requested."""
    ids: tuple[int, ...] = ()
    """All tokens read since the previous piece, if ids are requested."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """Options for turning tokens into text."""

    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    """Keep the stop string, or the client's stop token, in the text."""
    shows_special: bool = False
    with_logprobs: bool = False
    with_ids: bool = False
    min_tokens: int = 0
    """Stop strings complete within this many tokens are ignored."""
    stop_token_ids: frozenset[int] = frozenset()
    sums_hidden: bool = False
    """For embeddings: sum the hidden states of all tokens instead of keeping the last."""


@dataclass(frozen=True, slots=True)
class Given:
    """Prompt tokens that the worker generates as forced, for log-probabilities or to be echoed."""

    tokens: int = 0
    """Number of forced tokens at the beginning of the worker's output."""
    prompt: tuple[int, ...] = ()
    text: str | None = None
    """The prompt's text, if the answer is to begin with it."""


NOT_GIVEN = Given()


class ChoiceText:
    """Reads a stream's tokens as they arrive. Unread tokens stay in the stream."""

    def __init__(
        self,
        index: int,
        stream: Stream,
        tokenizer: Tokenizer,
        end_token_ids: Sequence[int],
        rules: TextRules = TextRules(),
        given: Given = NOT_GIVEN,
    ) -> None:
        self.index = index
        self.stream = stream
        self.finish_reason: FinishReason | None = None
        self.is_cut = False
        """A stop string is complete; the rest of the sequence is not needed."""
        self.completion_tokens = 0
        """Number of tokens read, including the one that ended the answer."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """Log-probabilities of the forced prompt's tokens; the first has none."""
        self.hidden = b""
        """For embeddings: the last token's hidden state, or the sum of all, as packed fp32."""
        self._tokenizer = tokenizer
        self._rules = rules
        self._given = given
        self._read_tokens = 0
        self._told_tokens = given.tokens
        self._detokenizer = Detokenizer(tokenizer, shows_special=rules.shows_special)
        self._stops = StopMatcher(rules.stops, includes=rules.includes_stop) if rules.stops else None
        self._end_token_ids = frozenset(end_token_ids)
        self._alignment = Alignment(len(given.text or "")) if rules.with_logprobs else None
        self._shows_prompt = given.text is not None
        details = rules.stops or rules.with_logprobs or rules.with_ids
        self.is_plain = not (details or given.tokens or self._shows_prompt)
        """Its pieces are texts of new tokens, until the last one."""

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string, or the client's stop token, that ended the answer."""
        if self.is_cut and self._stops is not None:
            return self._stops.matched
        if self.finish_reason is not FinishReason.STOP or not self.stream.tokens:
            return None
        last = self.stream.tokens[-1]
        return last if last in self._rules.stop_token_ids else None

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens of the answer read so far."""
        return tuple(self.stream.tokens[self._given.tokens : self._read_tokens])

    def read_each(self) -> Iterator[TextPiece]:
        """Like `read`, one token at a time: the pieces do not depend on how tokens arrived."""
        while True:
            read_tokens = self._read_tokens
            if (piece := self.read(most_tokens=1)) is not None:
                yield piece
            if self.finish_reason is not None or self._read_tokens == read_tokens:
                return

    def read(self, most_tokens: int = MOST_COUNT) -> TextPiece | None:
        """Return the text of the new tokens, at most `most_tokens`; None when nothing can be shown yet."""
        if self.finish_reason is not None:
            return None
        text = self._next(self._read_tokens + most_tokens)
        if self.is_cut:
            self.finish_reason = FinishReason.STOP
        elif self.stream.finish_reason is not None and self._read_tokens == len(self.stream.tokens):
            text += self._feed(self._detokenizer.flush())
            text += "" if self._stops is None else self._stops.flush()
            self.finish_reason = FinishReason.STOP if self.is_cut else self.stream.finish_reason
        tokens: tuple[PlacedToken, ...] = ()
        if self._alignment is not None:
            tokens = self._alignment.on_shown(len(text))
            if self.finish_reason is not None:
                tokens += self._alignment.on_end(is_cut=self.is_cut)
        if self._shows_prompt and (self._read_tokens > self._given.tokens or self.finish_reason is not None):
            self._shows_prompt = False
            text = (self._given.text or "") + text
            tokens = (self._placed_prompt() if self._alignment is not None else ()) + tokens
        if not text and self.finish_reason is None:
            return None
        ids: tuple[int, ...] = ()
        if self._rules.with_ids:
            told, self._told_tokens = self._told_tokens, max(self._told_tokens, self._read_tokens)
            ids = tuple(self.stream.tokens[told : self._read_tokens])
        return TextPiece(text, self.finish_reason, tokens, ids)

    def read_plain(self, end: int = MOST_COUNT) -> str:
        """Return the text of the new tokens of a plain answer, up to index `end`."""
        new = self.stream.tokens[self._read_tokens : end]
        self._read_tokens += len(new)
        self.completion_tokens += len(new)
        if not self._end_token_ids.isdisjoint(new):
            new = [token for token in new if token not in self._end_token_ids]
        return self._detokenizer.feed_all(new)

    def _next(self, end: int) -> str:
        """Read the tokens up to index `end`; return the text that can be shown then."""
        text, tokens = "", self.stream.tokens
        end = min(end, len(tokens))
        if self.is_plain and not self.stream.logprobs:
            return self.read_plain(end)
        while self._read_tokens < end and not self.is_cut:
            token = tokens[self._read_tokens]
            logprobs = self.stream.logprobs.pop(self._read_tokens, None)
            self._read_tokens += 1
            if logprobs is not None and logprobs.hidden:
                sums = self._rules.sums_hidden
                self.hidden = _summed(self.hidden, logprobs.hidden) if sums else logprobs.hidden
            if self._read_tokens <= self._given.tokens:
                self.prompt_logprobs.append(logprobs)
                continue
            self.completion_tokens += 1
            if token not in self._end_token_ids:
                if self._alignment is not None:
                    self._alignment.on_token(token, logprobs)
                text += self._feed(self._detokenizer.feed(token))
        return text

    def _feed(self, text: str) -> str:
        if self._alignment is not None:
            self._alignment.on_text(len(text))
        if self._stops is None:
            return text
        shown = self._stops.feed(text, is_early=self.completion_tokens <= self._rules.min_tokens)
        self.is_cut = self._stops.matched is not None
        return shown

    def _placed_prompt(self) -> tuple[PlacedToken, ...]:
        detokenizer, found, offset = Detokenizer(self._tokenizer), [], 0
        for token, logprobs in zip(self._given.prompt, self.prompt_logprobs, strict=False):
            found.append(PlacedToken(token, logprobs, offset))
            offset += len(detokenizer.feed(token))
        return tuple(found)


def _summed(sum_so_far: bytes, hidden: bytes) -> bytes:
    state = np.frombuffer(hidden, dtype="<f4")
    return hidden if not sum_so_far else (np.frombuffer(sum_so_far, dtype="<f4") + state).tobytes()
