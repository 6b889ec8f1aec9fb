"""What a single token id stands for: its bytes, and a text for people.

The bytes of an answer's tokens, joined, are the bytes of its text (special tokens aside), also where a
character spans tokens. Knows the two ways tokenizers keep bytes (byte-level alphabets, byte fallback); for
any other a token's bytes are those of its decoded text.
"""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer

SPACE_MARK = "▁"
"""What sentencepiece writes for a space."""


class Vocabulary:
    """Of one tokenizer. Remembers every id it was asked for: at most the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer)
        self._added: dict[int, str] = {
            token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()
        }
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Its text; bytes that are no whole characters are written as `\\xe2`, as OpenAI does."""
        return self._look_up(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """Its UTF-8 bytes, possibly a part of a character; none for an id the tokenizer does not know."""
        return self._look_up(token)[1]

    def _look_up(self, token: int) -> tuple[str, bytes]:
        known = self._known.get(token)
        if known is None:
            data = self._bytes(token)
            known = (data.decode("utf-8", "backslashreplace"), data)
            if self._tokenizer.id_to_token(token) is not None:
                self._known[token] = known
        return known

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        written: str | None = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if "ByteLevel" in self._kinds:
            alphabet = byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in written)
        if "ByteFallback" in self._kinds and len(written) == 6 and written.startswith("<0x"):
            return bytes([int(written[3:5], 16)])
        if self._kinds & {"ByteFallback", "Metaspace"}:
            return written.replace(SPACE_MARK, " ").encode()
        decoded: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return decoded.encode()


def _decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    """Names of the steps of its decoder."""
    if tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(str(step.get("type")) for step in (state, *state.get("decoders", ())))


@cache
def byte_alphabet() -> dict[str, int]:
    """The 256 characters of GPT-2's byte-level alphabet: printable bytes are themselves, the rest follow
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
