"""Which transport is tried first: what both have, what was measured, what failed lately."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.transport.core.choice import TransportChoice

ALL = {"tcp": "h:1", "shm": "@a", "ucx": "h:2"}


def test_before_any_measurement_shared_memory_comes_first_on_one_host() -> None:
    choice = TransportChoice(ALL, "host-a")
    assert choice.ranking("b", ALL, "host-a", 0.0) == ["shm", "ucx", "tcp"]
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["ucx", "tcp"]
    assert choice.ranking("b", {"tcp": "h:1", "shm": "@b"}, "host-b", 0.0) == ["tcp"]
    assert choice.ranking("b", {}, "host-a", 0.0) == []


def test_a_transport_measured_clearly_faster_moves_up() -> None:
    choice = TransportChoice(ALL, "host-a")
    choice.on_transfer("b", "ucx", 10 << 20, 0.010)
    choice.on_transfer("b", "tcp", 10 << 20, 0.009)
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["ucx", "tcp"]
    for _ in range(20):
        choice.on_transfer("b", "tcp", 10 << 20, 0.004)
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["tcp", "ucx"]
    assert choice.ranking("c", ALL, "host-b", 0.0) == ["ucx", "tcp"]
    choice.on_lost("b")
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["ucx", "tcp"]


def test_small_transfers_say_nothing_of_bandwidth() -> None:
    choice = TransportChoice(ALL, "host-a")
    choice.on_transfer("b", "tcp", 1000, 1e-9)
    assert choice.gb_per_s == {}


def test_what_failed_is_set_aside_for_a_while_unless_it_is_all_there_is() -> None:
    choice = TransportChoice(ALL, "host-a")
    choice.on_failure("b", "shm", 0.0)
    assert choice.ranking("b", ALL, "host-a", 29.0) == ["ucx", "tcp"]
    assert choice.ranking("b", ALL, "host-a", 30.0) == ["shm", "ucx", "tcp"]
    choice.on_failure("b", "tcp", 0.0)
    assert choice.ranking("b", {"tcp": "h:1"}, "host-b", 1.0) == ["tcp"]


_EVENTS = st.one_of(
    st.tuples(st.just("transfer"), st.sampled_from("bc"), st.sampled_from(list(ALL)), st.floats(1e-6, 10)),
    st.tuples(st.just("failure"), st.sampled_from("bc"), st.sampled_from(list(ALL)), st.floats(0, 100)),
    st.tuples(st.just("lost"), st.sampled_from("bc"), st.just(""), st.just(0.0)),
)


@given(st.lists(_EVENTS, max_size=30), st.dictionaries(st.sampled_from(list(ALL)), st.just("x")))
def test_a_ranking_names_what_both_have_once_and_something_if_there_is_anything(
    events: list[tuple[str, str, str, float]], addresses: dict[str, str]
) -> None:
    choice = TransportChoice(ALL, "host-a")
    for what, peer, transport, value in events:
        if what == "transfer":
            choice.on_transfer(peer, transport, 1 << 24, value)
        elif what == "failure":
            choice.on_failure(peer, transport, value)
        else:
            choice.on_lost(peer)
        choice.check_integrity()
        ranking = choice.ranking("b", addresses, "host-a", 50.0)
        assert len(set(ranking)) == len(ranking)
        assert set(ranking) <= set(addresses)
        assert bool(ranking) == bool(addresses)
