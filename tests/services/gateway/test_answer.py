"""Tokens to pieces of text: the end token unseen, stop strings cut, usage up to what ended it."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.answer import Answer
from services.gateway.streams import Stream
from services.gateway.timing import StreamTiming
from services.gateway.tokenizer import Codec
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenDelta
from tests.services.gateway.conftest import ANSWER

END = 2


def feed(stream: Stream, tokens: list[int], end: FinishReason | None = None) -> None:
    delta = TokenDelta(*stream.key, 1, len(stream.tokens), tuple(tokens), end)
    stream.on_delta(delta, ("w", 1), 0.0)


def make(codec: Codec, stops: tuple[str, ...] = (), ends: tuple[int, ...] = (END,)) -> Answer:
    stream = Stream(("req", 0), StreamTiming(), 0.0)
    return Answer(0, stream, codec.tokenizer, stops, ends)


def ids(codec: Codec, text: str = ANSWER) -> list[int]:
    tokens: list[int] = codec.tokenizer.encode(text, add_special_tokens=False).ids
    return tokens


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 60), max_size=6))
def test_however_tokens_arrive_the_text_is_the_same(codec: Codec, cuts: list[int]) -> None:
    answer = make(codec)
    tokens = [*ids(codec), END]
    edges = sorted({0, *(min(cut, len(tokens) - 1) for cut in cuts), len(tokens)})
    text = ""
    for start, stop in pairwise(edges):
        last = stop == len(tokens)
        feed(answer.stream, tokens[start:stop], FinishReason.STOP if last else None)
        piece = answer.read()
        text += piece.text if piece else ""
    assert text == ANSWER
    assert answer.finish_reason is FinishReason.STOP
    assert answer.completion_tokens == len(tokens)
    assert answer.read() is None


def test_a_stop_string_ends_it_and_what_follows_does_not_count(codec: Codec) -> None:
    answer = make(codec, ("fox",))
    tokens = ids(codec)
    feed(answer.stream, tokens)
    piece = answer.read()
    assert piece is not None
    assert piece.text == ANSWER.split("fox")[0]
    assert piece.finish_reason is FinishReason.STOP
    assert answer.is_cut
    assert "fox" in codec.tokenizer.decode(tokens[: answer.completion_tokens])
    assert "fox" not in codec.tokenizer.decode(tokens[: answer.completion_tokens - 1])


def test_what_was_held_back_for_a_stop_string_shows_at_the_end(codec: Codec) -> None:
    answer = make(codec, ("truly. And",))
    feed(answer.stream, ids(codec))
    shown = answer.read()
    assert shown is not None and not shown.text.endswith("truly.")
    feed(answer.stream, [END], FinishReason.STOP)
    rest = answer.read()
    assert rest is not None
    assert shown.text + rest.text == ANSWER


def test_nothing_to_show_is_none_until_the_end(codec: Codec) -> None:
    answer = make(codec)
    assert answer.read() is None
    feed(answer.stream, ids(codec, "語")[:1])
    assert answer.read() is None
    feed(answer.stream, [], FinishReason.LENGTH)
    piece = answer.read()
    assert piece is not None
    assert (piece.text, piece.finish_reason) == ("�", FinishReason.LENGTH)


@pytest.mark.parametrize("ends", [(END,), ()])
def test_an_answer_of_nothing_but_its_end(codec: Codec, ends: tuple[int, ...]) -> None:
    answer = make(codec, ends=ends)
    feed(answer.stream, [END], FinishReason.STOP)
    piece = answer.read()
    assert piece is not None
    assert (piece.text, answer.completion_tokens) == ("", 1)
