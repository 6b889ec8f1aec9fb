"""Text from tokens that arrive a few at a time; characters that span tokens come out whole.

The pieces of one answer, joined, are what decoding all its tokens at once gives; special tokens are not
shown. Knows nothing of stop strings or of where tokens come from.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


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
