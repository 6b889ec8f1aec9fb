"""Who gives way when there are not connections enough: who waits for no answer, the longest idle first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import HttpError
from services.gateway.http.connection import ConnectionTable, address_key


def full(engaged: tuple[str, ...] = (), idle: tuple[str, ...] = ()) -> ConnectionTable[str]:
    """A table without room, of connections from as many addresses."""
    table = ConnectionTable[str](len(engaged) + len(idle), 100)
    for name in (*idle, *engaged):
        assert table.arrive(name, f"of {name}") is None
    for name in engaged:
        table.engage(name)
    return table


def test_the_longest_idle_gives_way_and_an_engaged_one_never() -> None:
    """Thousands of connections held without a key used to shut everybody else out."""
    table = full(engaged=("a",), idle=("b", "c"))
    assert table.arrive("d", "x") == "b"
    table.engage("c")
    assert table.arrive("e", "x") == "d"
    table.engage("e")
    with pytest.raises(HttpError, match="try again later") as caught:
        table.arrive("f", "x")
    assert (caught.value.status, caught.value.error_code) == (503, "overloaded")
    table.disengage("a")
    assert table.arrive("f", "x") == "a"
    assert len(table) == 3


def test_one_address_displaces_its_own() -> None:
    table = ConnectionTable[str](100, 2)
    table.arrive("other", "y")
    assert [table.arrive(name, "x") for name in "abc"] == [None, None, "a"]
    table.engage("b")
    table.engage("c")
    with pytest.raises(HttpError, match="from this address") as caught:
        table.arrive("d", "x")
    assert (caught.value.status, caught.value.error_code) == (429, "too_many_connections")
    assert table.arrive("e", "y") is None
    table.leave("b")
    assert table.arrive("d", "x") is None


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a socket", "a socket"),
        (None, ""),
    ],
)
def test_what_counts_as_one_address(host: str | None, key: str) -> None:
    assert address_key(host) == key


@given(st.lists(st.tuples(st.sampled_from(["arrive", "engage", "disengage", "leave"]), st.integers(0, 9))))
def test_the_bounds_hold_whatever_happens(steps: list[tuple[str, int]]) -> None:
    table, there, engaged = ConnectionTable[int](5, 3), dict[int, str](), set[int]()
    for step, connection in steps:
        address = str(connection % 2)
        if step != "arrive":
            getattr(table, step)(connection)
            if step == "leave":
                there.pop(connection, None)
            engaged = engaged | {connection} if step == "engage" else engaged - {connection}
            engaged &= set(there)
        elif connection not in there:
            try:
                displaced = table.arrive(connection, address)
            except HttpError:
                mine = {other for other in there if there[other] == address}
                assert set(there) <= engaged or (len(mine) == 3 and mine <= engaged)
                continue
            assert displaced not in engaged
            if displaced is not None:
                del there[displaced]
            there[connection] = address
        assert len(table) == len(there) <= 5
        assert all(list(there.values()).count(address) <= 3 for address in "01")
