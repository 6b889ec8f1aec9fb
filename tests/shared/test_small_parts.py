"""Averages, maps whose entries expire, releases, shares of a queue; names of blocks; errors on the wire."""

import logging
from itertools import product

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest import LogCaptureFixture

from shared import errors
from shared.average import averaged
from shared.blocks import HASH_BYTES, chain, child, fingerprint, root
from shared.errors import KvasirError, from_wire, to_wire
from shared.messages.sequence import is_beyond_share, pack_tokens
from shared.release import PROTOCOL, ReleaseWatch, works_with
from shared.ttl_map import RecentMap, Tombstones
from tests.shared.messages.builders import ref


def test_the_first_counts_whole_and_an_old_one_ever_less() -> None:
    value = averaged(None, 2.0, 0.1)
    assert value == 2.0 and averaged(value, 4.0, 0.1) == pytest.approx(2.2)
    for _ in range(100):
        value = averaged(value, 4.0, 0.1)
    assert value == pytest.approx(4.0, abs=1e-3)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_it_lies_between_what_was_measured(measured: list[float], weight: float) -> None:
    value: float | None = None
    for one in measured:
        value = averaged(value, one, weight)
    assert value is not None and min(measured) - 1e-6 <= value <= max(measured) + 1e-6


def test_entries_are_there_for_their_time_only() -> None:
    recent: RecentMap[str, int] = RecentMap(ttl_s=10.0, limit=100)
    recent.put("a", 1, 0.0)
    assert recent.get("a", 10.0) == 1 and recent.get("a", 10.1) is None and recent.get("b", 0.0) is None
    assert recent.get("a") == 1, "not forgotten yet"
    recent.expire(10.1)
    assert recent.get("a") is None


def test_putting_again_renews() -> None:
    recent: RecentMap[str, int] = RecentMap(ttl_s=10.0, limit=100)
    recent.put("a", 1, 0.0)
    recent.put("b", 2, 1.0)
    recent.put("a", 3, 9.0)
    recent.expire(12.0)
    assert recent.items() == [("a", 3)]


def test_the_oldest_makes_room() -> None:
    recent: RecentMap[int, int] = RecentMap(ttl_s=10.0, limit=3)
    for number in range(5):
        recent.put(number, number, 0.0)
    assert [key for key, _ in recent.items()] == [2, 3, 4]
    recent.pop(3)
    recent.pop(3)
    assert len(recent) == 2


def test_an_attempt_and_every_lower_one_of_that_gateway_alone() -> None:
    stones = Tombstones(ttl_s=10.0, limit=100)
    stones.put("gateway-0", ref("a", 3), 0.0)
    stones.put("gateway-0", ref("a", 2), 1.0)
    assert [stones.covers("gateway-0", ref("a", a), 1.0) for a in (1, 3, 4)] == [True, True, False]
    assert not stones.covers("gateway-1", ref("a", 1), 1.0)
    assert not stones.covers("gateway-0", ref("b", 1), 1.0)


def test_they_fade() -> None:
    stones = Tombstones(ttl_s=10.0, limit=100)
    stones.put("gateway-0", ref("a"), 0.0)
    stones.put("gateway-1", ref("b"), 5.0)
    assert stones.covers("gateway-0", ref("a"), 10.0) and not stones.covers("gateway-0", ref("a"), 10.1)
    assert stones.covers("gateway-0", ref("a")), "not forgotten yet"
    stones.expire(10.1)
    assert not stones.covers("gateway-0", ref("a")) and stones.covers("gateway-1", ref("b"))
    stones.expire(20.0)
    assert len(stones) == 0


def test_a_gateway_crowds_nobody_else_s_out() -> None:
    """Keeps one that cancels whatever comes to its mind from bringing another's cancelled sequences back."""
    stones = Tombstones(ttl_s=10.0, limit=3)
    stones.put("gateway-0", ref("a"), 0.0)
    for number in range(5):
        stones.put("gateway-1", ref(f"r{number}"), 1.0)
    assert stones.covers("gateway-0", ref("a")) and len(stones) == 4
    covered = [stones.covers("gateway-1", ref(f"r{number}")) for number in range(5)]
    assert covered == [False, False, True, True, True]


def test_one_release_apart_is_supported() -> None:
    assert [works_with(PROTOCOL + apart) for apart in (-2, -1, 0, 1, 2)] == [False, True, True, True, False]


def test_who_is_too_far_apart_is_named_once_and_again_when_it_has_changed(caplog: LogCaptureFixture) -> None:
    watch = ReleaseWatch()
    with caplog.at_level(logging.WARNING):
        told = [watch.note("worker-0", PROTOCOL + later) for later in (0, 2, 2, 3, 1)]
    assert told == [False, True, False, True, False]
    assert len(caplog.messages) == 2 and "worker-0" in caplog.messages[0]


def test_nobody_is_refused_where_there_is_room() -> None:
    assert not is_beyond_share({"flood": 9}, "flood", 10)


def test_who_has_less_than_his_share_of_a_full_queue_may_have_more() -> None:
    full = {"flood": 9, "a": 1}
    assert is_beyond_share(full, "flood", 10)
    assert not is_beyond_share(full, "a", 10) and not is_beyond_share(full, "new", 10)
    assert is_beyond_share({"flood": 9, "a": 5}, "a", 10)


def test_there_is_an_end_to_it() -> None:
    assert is_beyond_share({str(name): 1 for name in range(20)}, "new", 10)


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ROOT = root(b"fingerprint")
PARTS = {"model": "llama", "dtype": "float32", "layout": "v1"}


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_two_chains_share_what_their_tokens_share(first: list[int], second: list[int], block: int) -> None:
    names = [chain(ROOT, pack_tokens(tokens), block) for tokens in (first, second)]
    assert len(names[0]) == len(first) // block
    for end in range(1, min(map(len, names)) + 1):
        same = first[: end * block] == second[: end * block]
        assert (names[0][end - 1] == names[1][end - 1]) == same


@given(TOKENS, st.integers(1, 8))
def test_a_chain_grows_block_by_block(tokens: list[int], block: int) -> None:
    parent = ROOT
    for index, name in enumerate(chain(ROOT, pack_tokens(tokens), block)):
        parent = child(parent, pack_tokens(tokens[index * block : (index + 1) * block]))
        assert name == parent and len(name) == HASH_BYTES


def test_tenants_and_models_share_no_block() -> None:
    tokens = pack_tokens([1, 2, 3, 4])
    roots = [ROOT, root(b"fingerprint", b"tenant"), root(b"fingerprint", b"other"), root(b"another model")]
    assert len({chain(each, tokens, 4)[0] for each in roots}) == len(roots)


@pytest.mark.parametrize("part", PARTS)
def test_a_fingerprint_depends_on_every_part(part: str) -> None:
    other = fingerprint(**{**PARTS, part: "another"}, block_tokens=16)
    assert other != fingerprint(**PARTS, block_tokens=16) != fingerprint(**PARTS, block_tokens=32)


def test_parts_do_not_run_into_each_other() -> None:
    first = fingerprint(model="ab", dtype="c", layout="e", block_tokens=16)
    assert first != fingerprint(model="a", dtype="bc", layout="e", block_tokens=16)


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        chain(ROOT, bytes(7), 1)


def tree_of(error: type[KvasirError]) -> list[type[KvasirError]]:
    ours = [one for one in error.__subclasses__() if one.__module__ == errors.__name__]
    return [error, *(found for one in ours for found in tree_of(one))]


ALL = tree_of(KvasirError)


def test_wire_codes_are_unique_and_stable_looking() -> None:
    codes = [error.code for error in ALL]
    assert len(set(codes)) == len(codes)
    assert all(code.isidentifier() and code == code.lower() for code in codes)


@pytest.mark.parametrize("error_type", ALL)
def test_every_error_crosses_the_wire(error_type: type[KvasirError]) -> None:
    for error in (error_type("what to do"), error_type("what to do", param="n", retry_after_s=1.5)):
        arrived = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error))))
        assert type(arrived) is error_type
        for name in ("message", "param", "retry_after_s"):
            assert getattr(arrived, name) == getattr(error, name)
        assert str(arrived) == "what to do"


def test_an_odd_error_is_an_error_all_the_same() -> None:
    """Keeps what a peer writes into an error from becoming a header or a length somewhere else."""
    odd = product(
        ("overloaded", "no such code", 5, None, ["x"]),
        ("x", "A" * 100_000, 5, None),
        (None, 5, ["a"], "p", "p" * 5000),
        (float("inf"), float("nan"), "soon", -5, [1], True, 2**64, 1.5),
    )
    for code, message, param, retry_after_s in odd:
        arrived = from_wire(
            {"code": code, "message": message, "param": param, "retry_after_s": retry_after_s}
        )
        assert len(arrived.message) <= 2000
        assert arrived.param is None or len(arrived.param) <= 200
        assert arrived.retry_after_s in (None, 1.5)


def test_foreign_exceptions_leave_only_their_type() -> None:
    arrived = from_wire(to_wire(ValueError("a secret")))
    assert type(arrived) is errors.InternalError
    assert "ValueError" in arrived.message and "secret" not in arrived.message


@pytest.mark.parametrize("wire", [{"code": "from_the_future", "message": "m"}, {}, {"code": 7, "extra": []}])
def test_an_unknown_code_is_a_plain_error(wire: dict[str, object]) -> None:
    assert type(from_wire(wire)) is KvasirError
