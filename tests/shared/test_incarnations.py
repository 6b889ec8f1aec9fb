"""Of several starts of one instance the present one is listened to, whatever clocks say, and nobody for ever.

Keeps from coming back: incarnations that were the time of day, so that a gateway started again after the
clock was set back was refused for good.
"""

from hypothesis import given
from hypothesis import strategies as st

from shared.incarnations import SILENCE_S, Incarnations, new_incarnation

EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5), st.floats(0, SILENCE_S)), max_size=40)


def test_a_new_start_replaces_the_one_before_whatever_its_number() -> None:
    for first, second in ((1, 2), (2, 1), (2**62, 1)):
        heard = Incarnations()
        assert heard.hear("gateway-0", first, 0.0)
        assert heard.hear("gateway-0", second, 0.1)
        assert heard.present("gateway-0") == second
        assert not heard.hear("gateway-0", first, 0.2), "frozen, and woken up"


def test_one_that_was_replaced_may_come_back_when_its_successor_is_silent() -> None:
    heard = Incarnations()
    heard.hear("worker-0", 1, 0.0)
    heard.hear("worker-0", 2, 1.0)
    assert not heard.hear("worker-0", 1, 1.0 + SILENCE_S)
    assert heard.is_another("worker-0", 1, 1.0 + SILENCE_S)
    assert not heard.is_another("worker-0", 1, 1.1 + SILENCE_S)
    assert heard.hear("worker-0", 1, 1.1 + SILENCE_S)
    assert not heard.hear("worker-0", 2, 2.0 + SILENCE_S)


def test_time_in_which_the_reader_did_not_listen_is_no_silence() -> None:
    heard = Incarnations()
    heard.hear("worker-0", 1, 0.0)
    heard.hear("worker-0", 2, 0.0)
    heard.forgive(100.0)
    assert not heard.hear("worker-0", 1, 100.0)


def test_what_is_remembered_is_bounded() -> None:
    heard = Incarnations()
    for number in range(20_000):
        assert heard.hear("worker-0", number, 0.0)
        assert heard.hear(f"worker-{number}", 1, 0.0) or number == 0
    assert heard.present("worker-1") is None and heard.present("worker-19999") == 1


def test_numbers_are_positive_and_differ() -> None:
    drawn = {new_incarnation() for _ in range(1000)}
    assert len(drawn) == 1000 and all(0 < number < 2**62 for number in drawn)


@given(EVENTS)
def test_whoever_goes_on_speaking_alone_is_heard(events: list[tuple[str, int, float]]) -> None:
    """Whatever came before, a start that alone is heard is the present one after a silence at the latest."""
    heard, now_s = Incarnations(), 0.0
    for instance, incarnation, after_s in events:
        now_s += after_s
        was_listened_to = heard.hear(instance, incarnation, now_s)
        assert was_listened_to == (heard.present(instance) == incarnation)
    for instance, incarnation in {(instance, incarnation) for instance, incarnation, _ in events}:
        now_s += 2 * SILENCE_S
        assert heard.hear(instance, incarnation, now_s)
