"""The bytes of tokens, joined, are the bytes of the text, with every way to keep bytes in a vocabulary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.gateway.text.tokenizer import Codec, Vocabulary
from tests.services.gateway.conftest import ANSWER


def with_byte_fallback() -> Tokenizer:
    """As sentencepiece models come: a space is ▁, an unknown character its bytes."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "b": 258, "▁a": 259}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    return with_byte_fallback()


def joined(tokenizer: Tokenizer, text: str) -> str:
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return b"".join(vocabulary.bytes_of(token) for token in ids).decode()


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=20))
def test_byte_level(codec: Codec, text: str) -> None:
    assert joined(codec.tokenizer, text + ANSWER) == text + ANSWER


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.sampled_from("ab c日😀é\n"), max_size=20))
def test_byte_fallback(fallback: Tokenizer, text: str) -> None:
    assert joined(fallback, text) == text


def test_parts_of_characters_are_written_as_bytes(codec: Codec, fallback: Tokenizer) -> None:
    vocabulary = Vocabulary(fallback)
    assert (vocabulary.text(0xE6), vocabulary.bytes_of(0xE6)) == ("\\xe6", b"\xe6")
    assert vocabulary.text(259) == " a"
    part = codec.tokenizer.encode("日", add_special_tokens=False).ids[0]
    assert Vocabulary(codec.tokenizer).text(part) == "\\xe6\\x97"


def test_special_tokens_are_themselves_and_unknown_ids_nothing(codec: Codec) -> None:
    vocabulary = Vocabulary(codec.tokenizer)
    assert vocabulary.text(2) == "<|end|>"
    assert (vocabulary.text(10_000_000), vocabulary.bytes_of(10_000_000)) == ("", b"")


def test_other_decoders_show_what_they_decode() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"hel": 0, "##lo": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert Vocabulary(tokenizer).text(0) == "hel"
    plain = Tokenizer(models.WordLevel(vocab={"hi": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert Vocabulary(plain).bytes_of(0) == b"hi"
