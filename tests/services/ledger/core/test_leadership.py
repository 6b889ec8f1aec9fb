"""Who leads: the smallest id that is heard, and nobody that does not hear itself."""

from hypothesis import given
from hypothesis import strategies as st

from services.ledger.core.dgfm.coordinator import Leadership

SILENCE_S = 2.0


def make(ledger_id: str = "ledger-1", incarnation: int = 5) -> Leadership:
    return Leadership(ledger_id, incarnation, silence_s=SILENCE_S)


def hear(one: Leadership, *lives: tuple[str, int], from_s: float, to_s: float) -> None:
    """Every half second."""
    for half in range(round(2 * from_s), round(2 * to_s) + 1):
        for ledger_id, incarnation in lives:
            one.on_announced(ledger_id, incarnation, half / 2)
        one.check_integrity()


def test_one_that_is_alone_leads_after_listening() -> None:
    one = make()
    assert not one.leads(100.0), "it has not even heard itself"
    hear(one, ("ledger-1", 5), from_s=0.0, to_s=1.5)
    assert not one.leads(1.9)
    hear(one, ("ledger-1", 5), from_s=2.0, to_s=2.0)
    assert one.leads(2.0)
    assert one.leads(4.0)
    assert not one.leads(4.1), "cut off"


def test_the_smallest_id_leads_until_it_is_silent() -> None:
    first, second = make("ledger-0", 1), make()
    for one in (first, second):
        hear(one, ("ledger-0", 1), ("ledger-1", 5), from_s=0.0, to_s=4.0)
    assert (first.leads(4.0), second.leads(4.0)) == (True, False)
    assert second.heard(4.0) == ["ledger-0", "ledger-1"]
    hear(second, ("ledger-1", 5), from_s=4.5, to_s=6.0)
    assert second.leads(6.1)
    assert second.heard(6.1) == ["ledger-1"]
    hear(second, ("ledger-0", 2), ("ledger-1", 5), from_s=6.5, to_s=6.5)
    assert not second.leads(6.5), "a new life of it is there"


def test_who_was_stopped_listens_again() -> None:
    one = make()
    hear(one, ("ledger-1", 5), from_s=0.0, to_s=3.0)
    assert one.leads(3.0)
    hear(one, ("ledger-1", 5), from_s=60.0, to_s=61.0)
    assert not one.leads(61.0)
    hear(one, ("ledger-1", 5), from_s=61.5, to_s=62.0)
    assert one.leads(62.0)


def test_of_two_lives_with_one_id_the_later_one_leads() -> None:
    old, new = make(incarnation=5), make(incarnation=6)
    for one in (old, new):
        hear(one, ("ledger-1", 5), ("ledger-1", 6), from_s=0.0, to_s=3.0)
    assert (old.leads(3.0), new.leads(3.0)) == (False, True)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=60),
)
def test_where_all_have_heard_all_exactly_one_leads(ids: list[int], noise: list[tuple[int, float]]) -> None:
    lives = [(f"ledger-{number}", 1) for number in ids]
    ledgers = [make(*life) for life in lives]
    now_s = 0.0
    for number, step_s in noise:  # some of what was there before, heard by some
        now_s += step_s
        ledgers[number % len(ledgers)].on_announced(f"ledger-{number}", 1, now_s)
        for one in ledgers:
            one.leads(now_s)
            one.check_integrity()
    now_s = round(now_s) + 10.0
    for one in ledgers:
        hear(one, *lives, from_s=now_s, to_s=now_s + SILENCE_S)
    leaders = [life for life, one in zip(lives, ledgers, strict=True) if one.leads(now_s + SILENCE_S)]
    assert leaders == [min(lives)]
