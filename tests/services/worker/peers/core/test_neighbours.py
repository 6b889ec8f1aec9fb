"""Living neighbours by heartbeats, speeds of links, and the order of transports."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.core.neighbours import LinkRate, LinkRates, Neighbours, TransportChoice
from tests.shared.messages.builders import worker_report

ALL = {"tcp": "h:1", "shm": "@a", "ucx": "h:2"}


def carry(choice: TransportChoice, peer: str, transport: str, size_bytes: int, took_s: float) -> None:
    choice.rates.link(peer, transport).on_carried(size_bytes, took_s)


def test_before_any_measurement_shared_memory_comes_first_on_one_host() -> None:
    choice = TransportChoice(ALL, "host-a")
    assert choice.ranking("b", ALL, "host-a", 0.0) == ["shm", "ucx", "tcp"]
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["ucx", "tcp"]
    assert choice.ranking("b", {"tcp": "h:1", "shm": "@b"}, "host-b", 0.0) == ["tcp"]
    assert choice.ranking("b", {}, "host-a", 0.0) == []


def test_a_transport_measured_clearly_faster_moves_up() -> None:
    choice = TransportChoice(ALL, "host-a")
    carry(choice, "b", "ucx", 10 << 20, 0.010)
    carry(choice, "b", "tcp", 10 << 20, 0.009)
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["ucx", "tcp"]
    for _ in range(20):
        carry(choice, "b", "tcp", 10 << 20, 0.004)
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["tcp", "ucx"]
    assert choice.ranking("c", ALL, "host-b", 0.0) == ["ucx", "tcp"]
    choice.forget("b")
    assert choice.ranking("b", ALL, "host-b", 0.0) == ["ucx", "tcp"]


def test_small_transfers_do_not_measure_a_link() -> None:
    rate = LinkRate()
    rate.on_carried(1000, 1e-9)
    rate.on_carried(1 << 20, 0.0)
    assert rate.bytes_per_s is None
    rate.on_carried(1 << 20, 0.5)
    assert rate.bytes_per_s == 2 << 20


def test_the_delivered_speed_replaces_the_links_speed() -> None:
    rates = LinkRates()
    assert rates.bytes_per_s("b") is None
    rates.link("b", "tcp").on_carried(1 << 20, 1.0)
    rates.link("b", "shm").on_carried(1 << 20, 0.5)
    rates.link("c", "shm").on_carried(1 << 20, 0.1)
    assert rates.bytes_per_s("b") == 2 << 20
    rates.on_delivered("b", 1000, 1.0)
    rates.on_delivered("b", 0, 1.0)
    assert rates.bytes_per_s("b") == 1000, "the first fetch counts for all"
    rates.on_delivered("b", 2000, 1.0)
    assert 1000 < (rates.bytes_per_s("b") or 0) < 2000
    assert rates.link("b", "shm").bytes_per_s == 2 << 20
    rates.forget("b")
    assert rates.bytes_per_s("b") is None and rates.bytes_per_s("c") is not None


@contextmanager
def _dialling(rates: LinkRates) -> Iterator[None]:
    """Another thread adds links, and runs between any two instructions."""
    is_over, interval_s = threading.Event(), sys.getswitchinterval()

    def dial() -> None:
        number = 0
        while not is_over.is_set():
            number = (number + 1) % 2000
            rates.link(f"other-{number}", "tcp")

    thread = threading.Thread(target=dial)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)


def test_another_thread_may_add_links_during_an_iteration() -> None:
    """A debtor enters its link on the engine's thread. The event loop, in the middle of the table, failed
    with "dictionary changed size during iteration": a heartbeat was left out, or a peer's old speeds stayed.
    """
    rates = LinkRates()
    rates.link("b", "tcp").on_carried(1 << 20, 1.0)
    with _dialling(rates):
        for number in range(500):
            assert rates.bytes_per_s("b") == 1 << 20
            rates.forget(f"other-{number}")


def test_neighbours_are_the_latest_incarnations_heard_lately() -> None:
    neighbours = Neighbours("w0")
    assert not neighbours.hear(worker_report("w0"), 0.0)
    assert not neighbours.hear(worker_report("w1", incarnation=1, host="a", model="m"), 0.0)
    assert not neighbours.hear(worker_report("w2", incarnation=1), 3.0)
    assert set(neighbours.known) == {"w1", "w2"} and neighbours.known["w1"].host == "a"
    assert neighbours.hear(worker_report("w1", incarnation=2, host="b"), 3.0), "measured with another life"
    assert not neighbours.hear(worker_report("w1", incarnation=1), 4.0), "it was frozen, and woke up"
    assert (neighbours.known["w1"].incarnation, neighbours.known["w1"].host) == (2, "b")
    assert neighbours.silent(8.0) == []
    assert neighbours.hear(worker_report("w2", incarnation=1), 8.1) is False
    assert neighbours.silent(8.2) == ["w1"]
    assert set(neighbours.known) == {"w2"}
    neighbours = Neighbours("w0")
    for name, most_lent, model in (("w1", 20, "m"), ("w2", 30, "m"), ("w3", 9, "other"), ("w0", 40, "m")):
        neighbours.hear(worker_report(name, model=model, most_lent_blocks=most_lent), 0.0)
    assert neighbours.lendable_tokens("m") == 50 * 16


def test_a_failed_transport_is_set_aside_unless_it_is_the_last() -> None:
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
def test_a_ranking_has_each_common_transport_once(
    events: list[tuple[str, str, str, float]], addresses: dict[str, str]
) -> None:
    choice = TransportChoice(ALL, "host-a")
    for what, peer, transport, value in events:
        if what == "transfer":
            carry(choice, peer, transport, 1 << 24, value)
        elif what == "failure":
            choice.on_failure(peer, transport, value)
        else:
            choice.forget(peer)
        ranking = choice.ranking("b", addresses, "host-a", 50.0)
        assert len(set(ranking)) == len(ranking)
        assert set(ranking) <= set(addresses)
        assert bool(ranking) == bool(addresses)
