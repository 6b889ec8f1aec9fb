"""Text from tokens one at a time is the text of all of them at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.choice_text import Detokenizer, decode
from services.gateway.text.tokenizer import Codec
from tests.services.gateway.conftest import ANSWER

VOCABULARY = 300


@settings(deadline=None, max_examples=300)
@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_any_tokens_even_broken_characters(codec: Codec, tokens: list[int]) -> None:
    detokenizer = Detokenizer(codec.tokenizer)
    pieces = [detokenizer.feed(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == decode(codec.tokenizer, tokens)


@pytest.mark.parametrize("text", [ANSWER, "😀😀", "日本語" * 5, "  two  spaces\n\n", "häß"])
def test_characters_of_several_tokens_come_out_whole(codec: Codec, text: str) -> None:
    detokenizer = Detokenizer(codec.tokenizer)
    pieces = [detokenizer.feed(t) for t in codec.tokenizer.encode(text, add_special_tokens=False).ids]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert detokenizer.flush() == ""


def test_special_tokens_are_not_shown(codec: Codec) -> None:
    detokenizer = Detokenizer(codec.tokenizer)
    hello = codec.tokenizer.encode("hello", add_special_tokens=False).ids
    assert "".join(detokenizer.feed(token) for token in [1, *hello, 5, 2]) == "hello"


def test_an_answer_that_ends_inside_a_character_shows_that(codec: Codec) -> None:
    detokenizer = Detokenizer(codec.tokenizer)
    cut = codec.tokenizer.encode("語", add_special_tokens=False).ids
    whole = decode(codec.tokenizer, cut[:-1])
    assert "".join(detokenizer.feed(token) for token in cut[:-1]) + detokenizer.flush() == whole
