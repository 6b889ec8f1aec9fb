"""Each token leaves once, in order, with the text that completes it, whatever is held back."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.choice_text import Alignment
from shared.messages.tokens import TokenLogprobs


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
