"""One choice as text: tokens in, pieces of text out, cut at a stop string. Knows no HTTP and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from services.gateway.alignment import Alignment, PlacedToken
from services.gateway.detokenizer import Detokenizer
from services.gateway.stops import StopMatcher
from services.gateway.streams import Stream
from shared.messages.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice; `finish_reason` is set on its last piece."""

    text: str
    finish_reason: FinishReason | None
    tokens: tuple[PlacedToken, ...] = ()
    """With log-probabilities, if they are asked for: those whose text ends in this piece."""


class Answer:
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

    def read(self) -> Piece | None:
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
        return Piece(text, self.finish_reason, self._shown(text))

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
