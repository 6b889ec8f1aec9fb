"""Tokens to pieces of text: the end token unseen, stop strings cut, usage up to what ended it. Text from
tokens one at a time is the text of all of them at once."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from services.gateway.core.stream import Stream, StreamTiming
from services.gateway.text.choice_text import (
    Alignment,
    ChoiceText,
    Detokenizer,
    StopMatcher,
    TextPiece,
    TextRules,
    decode,
)
from services.gateway.text.tokenizer import Codec, Vocabulary
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenDelta, TokenLogprobs
from tests.services.gateway.conftest import ANSWER
from tests.services.gateway.fakes import true_logprobs

END = 2


def feed(stream: Stream, tokens: list[int], end: FinishReason | None = None) -> None:
    first = len(stream.tokens)
    logprobs = tuple(true_logprobs(first + at, token, 2) for at, token in enumerate(tokens))
    delta = TokenDelta(*stream.key, 1, first, tuple(tokens), end, logprobs=logprobs)
    stream.on_delta(delta, ("w", 1), 0.0)


def make(
    codec: Codec, stops: tuple[str, ...] = (), ends: tuple[int, ...] = (END,), with_logprobs: bool = False
) -> ChoiceText:
    stream = Stream(("req", 0), StreamTiming(), 0.0)
    return ChoiceText(0, stream, codec.tokenizer, ends, TextRules(stops, with_logprobs=with_logprobs))


def ids(codec: Codec, text: str = ANSWER) -> list[int]:
    tokens: list[int] = codec.tokenizer.encode(text, add_special_tokens=False).ids
    return tokens


@given(
    cuts=st.lists(st.integers(0, 60), max_size=6), stops=st.sampled_from([(), ("lazy",), ("the lazy", "X")])
)
def test_however_tokens_come_pieces_are_equal(codec: Codec, cuts: list[int], stops: tuple[str, ...]) -> None:
    """Of who reads one token after the other: another gateway says again what the first one said."""
    tokens = [*ids(codec), END]
    edges = sorted({0, *(min(cut, len(tokens) - 1) for cut in cuts), len(tokens)})
    found, at_once = make(codec, stops), make(codec, stops)
    pieces: list[TextPiece] = []
    for start, stop in pairwise(edges):
        feed(found.stream, tokens[start:stop], FinishReason.STOP if stop == len(tokens) else None)
        pieces += found.read_each()
    feed(at_once.stream, tokens, FinishReason.STOP)
    assert pieces == list(at_once.read_each()) and pieces[-1].finish_reason is FinishReason.STOP
    assert len(pieces) > 5, "one for nearly every token"


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
    assert text == ANSWER and answer.finish_reason is FinishReason.STOP
    assert answer.completion_tokens == len(tokens) and answer.read() is None


def test_a_stop_string_ends_it_and_what_follows_does_not_count(codec: Codec) -> None:
    answer = make(codec, ("fox",))
    tokens = ids(codec)
    feed(answer.stream, tokens)
    piece = answer.read()
    assert piece is not None and piece.text == ANSWER.split("fox")[0]
    assert piece.finish_reason is FinishReason.STOP and answer.is_cut
    assert "fox" in codec.tokenizer.decode(tokens[: answer.completion_tokens])
    assert "fox" not in codec.tokenizer.decode(tokens[: answer.completion_tokens - 1])


def read_one_by_one(answer: ChoiceText, tokens: list[int]) -> list[TextPiece]:
    """Each token as it comes; the last one ends the answer."""
    pieces: list[TextPiece] = []
    for at, token in enumerate(tokens):
        feed(answer.stream, [token], FinishReason.STOP if at == len(tokens) - 1 else None)
        if (piece := answer.read()) is not None:
            pieces.append(piece)
    return pieces


@pytest.mark.parametrize("stops", [(), ("quick brawn", "日本人", "truly. And")])
def test_log_probabilities_come_with_the_text_of_their_tokens(codec: Codec, stops: tuple[str, ...]) -> None:
    vocabulary = Vocabulary(codec.tokenizer)
    tokens = ids(codec)
    pieces = read_one_by_one(make(codec, stops, with_logprobs=True), [*tokens, END])
    shown, text = b"", ""
    for piece in pieces:
        text += piece.text
        shown += b"".join(vocabulary.bytes_of(placed.token) for placed in piece.tokens)
        assert text.encode().startswith(shown), "no token goes ahead of its text"
    listed = [placed for piece in pieces for placed in piece.tokens]
    assert [placed.token for placed in listed] == tokens, "all but the end, which shows nothing"
    for at, placed in enumerate(listed):
        assert placed.logprobs == true_logprobs(at, placed.token, 2)
        part = vocabulary.bytes_of(placed.token)
        assert part in ANSWER[placed.offset : placed.offset + 20].encode()
    assert (text, shown.decode()) == (ANSWER, ANSWER)


VOCABULARY = 300


@settings(max_examples=300)
@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=40), cut=st.integers(0, 40))
def test_any_tokens_even_broken_characters(codec: Codec, tokens: list[int], cut: int) -> None:
    detokenizer, at_once = Detokenizer(codec.tokenizer), Detokenizer(codec.tokenizer)
    text = "".join([detokenizer.feed(token) for token in tokens])
    assert at_once.feed_all(tokens[:cut]) + at_once.feed_all(tokens[cut:]) == text
    assert text + detokenizer.flush() == decode(codec.tokenizer, tokens)


def pieced_tokenizer() -> Tokenizer:
    """As Llama 2's: spaces are marks, characters may be bytes, and a text's first space goes."""
    words = ["▁", "▁a", "a", "b", "▁b", "é", "日"]
    vocabulary = {word: at for at, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


@settings(deadline=None, max_examples=200)
@given(tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=30), shows_special=st.booleans())
def test_pieces_are_those_of_the_library_stream(codec: Codec, tokens: list[int], shows_special: bool) -> None:
    """Whether or not the text of a token is known beforehand."""
    for tokenizer, known in (
        (codec.tokenizer, tokens),
        (pieced_tokenizer(), [token % 7 for token in tokens]),
    ):
        stream = DecodeStream(skip_special_tokens=not shows_special)
        detokenizer = Detokenizer(tokenizer, shows_special=shows_special)
        for token in known:
            assert detokenizer.feed(token) == (stream.step(tokenizer, token) or "")


TEXTS = st.text(alphabet="ab\n", max_size=20)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> str:
    """Text before the stop string that is complete first, for a reader of a growing text."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_by_characters_it_is_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(character) for character in text)
    shown += matcher.flush()
    assert shown == expected(text, stops)
    assert (matcher.matched is None) == (not any(stop in text for stop in stops))


@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_in_any_pieces_no_stop_string_shows_and_nothing_is_lost(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces) + matcher.flush()
    assert text.startswith(shown) and not any(stop in shown for stop in stops)
    if matcher.matched is None:
        assert shown == text
    else:
        assert text[len(shown) :].startswith(matcher.matched)


@given(text=TEXTS, stops=STOPS)
def test_it_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.feed(text)
    held = text[len(shown) :]
    if matcher.matched is None and held:
        assert any(stop.startswith(held) for stop in stops)


def logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(-token / 10)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    held=st.lists(st.integers(0, 5), min_size=30, max_size=30),
    is_cut=st.booleans(),
)
def test_tokens_leave_once_and_not_before_their_text(sizes: list[int], held: list[int], is_cut: bool) -> None:
    alignment = Alignment()
    read = shown = 0
    left: list[int] = []
    for token, chars in enumerate(sizes):
        alignment.on_token(token, logprobs(token))
        alignment.on_text(chars)
        read += chars
        more = max(0, read - held[token] - shown)
        shown += more
        for placed in alignment.on_shown(more):
            left.append(placed.token)
            assert placed.logprobs == logprobs(placed.token)
            assert placed.offset <= sum(sizes[: placed.token]) and sum(sizes[: placed.token + 1]) <= shown
        alignment.check_integrity()
    rest = alignment.on_end(is_cut=is_cut)
    everything = left + [placed.token for placed in rest]
    assert everything == list(range(len(everything)))
    if is_cut:
        assert all(placed.offset < shown for placed in rest)
    else:
        assert len(everything) == len(sizes)
