"""One choice as text: tokens in, pieces of text out, cut at a stop string. Knows no HTTP and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.gateway.core.alignment import Alignment, PlacedToken
from services.gateway.core.stops import StopMatcher
from services.gateway.core.stream import Stream
from shared.messages.sequence import FinishReason


class Detokenizer:
    """Incremental decoding of one sequence. State is rebuilt by feeding the tokens again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._shown_chars = 0

    def feed(self, token: int) -> str:
        """The text this token completes; empty inside a character."""
        self._tokens.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._shown_chars += len(piece)
        return piece

    def flush(self) -> str:
        """What an answer that ended inside a character still shows: replacement characters."""
        rest = decode(self._tokenizer, self._tokens)[self._shown_chars :]
        self._shown_chars += len(rest)
        return rest


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """All tokens at once, special ones left out."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text of one choice; `finish_reason` is set on its last piece."""

    text: str
    finish_reason: FinishReason | None
    tokens: tuple[PlacedToken, ...] = ()
    """With log-probabilities, if they are asked for: those whose text ends in this piece."""


class ChoiceText:
    """Reads a stream's tokens as they come.

    What is not read yet stays in the stream: a slow reader costs nothing.
    """

    def __init__(
        self,
        index: int,
        stream: Stream,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        end_token_ids: Sequence[int],
        *,
        with_logprobs: bool = False,
    ) -> None:
        self.index = index
        self.stream = stream
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        """Tokens read, up to and including the one that ended the answer."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._end_token_ids = frozenset(end_token_ids)
        self._alignment = Alignment() if with_logprobs else None

    @property
    def is_cut(self) -> bool:
        """A stop string was completed: the rest of the sequence is not wanted."""
        return self._stops.matched is not None

    def read(self) -> TextPiece | None:
        """What the tokens that arrived since the last call show; None when nothing can be shown yet."""
        if self.finish_reason is not None:
            return None
        text = "".join(self._texts())
        if self.is_cut:
            self.finish_reason = FinishReason.STOP
        elif self.stream.finish_reason is not None:
            text += self._feed(self._detokenizer.flush()) + self._stops.flush()
            self.finish_reason = FinishReason.STOP if self.is_cut else self.stream.finish_reason
        if not text and self.finish_reason is None:
            return None
        return TextPiece(text, self.finish_reason, self._shown(text))

    def _texts(self) -> list[str]:
        texts: list[str] = []
        tokens = self.stream.tokens
        while self.completion_tokens < len(tokens) and not self.is_cut:
            token = tokens[self.completion_tokens]
            logprobs = self.stream.logprobs.pop(self.completion_tokens, None)
            self.completion_tokens += 1
            if token not in self._end_token_ids:
                if self._alignment is not None:
                    self._alignment.on_token(token, logprobs)
                texts.append(self._feed(self._detokenizer.feed(token)))
        return texts

    def _feed(self, text: str) -> str:
        """What may be shown after this."""
        if self._alignment is not None:
            self._alignment.on_text(len(text))
        return self._stops.feed(text)

    def _shown(self, text: str) -> tuple[PlacedToken, ...]:
        if self._alignment is None:
            return ()
        tokens = self._alignment.on_shown(len(text))
        if self.finish_reason is not None:
            tokens += self._alignment.on_end(is_cut=self.is_cut)
        return tokens
