"""Text is shown up to a stop string, and each token once, in order, with the text that completes it."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.choice_text import Alignment, StopMatcher
from shared.messages.tokens import TokenLogprobs

TEXTS = st.text(alphabet="ab\n", max_size=20)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> str:
    """What comes before the stop string that is complete first, for a reader of a growing text."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS)
def test_character_by_character_it_is_the_text_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
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
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
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
def test_tokens_leave_once_in_order_and_not_before_their_text(
    sizes: list[int], held: list[int], is_cut: bool
) -> None:
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
            assert placed.offset <= sum(sizes[: placed.token])
            assert sum(sizes[: placed.token + 1]) <= shown
        alignment.check_integrity()
    rest = alignment.on_end(is_cut=is_cut)
    everything = left + [placed.token for placed in rest]
    assert everything == list(range(len(everything)))
    if is_cut:
        assert all(placed.offset < shown for placed in rest)
    else:
        assert len(everything) == len(sizes)
