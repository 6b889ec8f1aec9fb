"""Stored responses are found by their key alone, until they are deleted, too old, or too many."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.gateway.errors import HttpError
from services.gateway.openai.response_store import ResponseStore
from shared.errors import ConfigError

ITEMS = [{"role": "user", "content": "Hello"}]
DAY_S = 86_400.0


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ResponseStore]:
    made = ResponseStore(tmp_path / "responses.db", most_bytes=1000, most_days=2, now_s=clock)
    yield made
    made.close()


async def names_in(store: ResponseStore, key: str, names: list[str]) -> list[str]:
    found = []
    for name in names:
        try:
            await store.find(key, name)
        except HttpError as error:
            assert error.status == 404
        else:
            found.append(name)
    return found


async def test_each_key_finds_its_own(store: ResponseStore) -> None:
    store.put("mine", "resp_1", b'{"a":1}', ITEMS)
    store.put("theirs", "resp_1", b'{"b":2}', [])
    found = await store.find("mine", "resp_1")
    assert (found.body, found.items) == (b'{"a":1}', ITEMS)
    await store.delete("mine", "resp_1")
    assert await names_in(store, "mine", ["resp_1"]) == []
    with pytest.raises(HttpError, match="no response 'resp_1'"):
        await store.delete("mine", "resp_1")
    assert (await store.find("theirs", "resp_1")).body == b'{"b":2}'


async def test_the_oldest_of_a_key_leave(store: ResponseStore, clock: Clock) -> None:
    """What another key has, stays; and one that is larger than all there may be is not kept at all."""
    store.put("theirs", "old", b"x" * 900, [])
    names = [f"resp_{number}" for number in range(6)]
    for name in names:
        clock.now_s += 1
        store.put("mine", name, b"x" * 298, [])
    assert await names_in(store, "mine", names) == names[-3:]
    clock.now_s += 1
    store.put("mine", "large", b"x" * 5000, [])
    assert await names_in(store, "mine", ["large"]) == []
    assert await names_in(store, "theirs", ["old"]) == ["old"]


async def test_two_gateways_share_a_file_that_nobody_else_reads(tmp_path: Path, store: ResponseStore) -> None:
    """And it outlives both."""
    path = tmp_path / "responses.db"
    other = ResponseStore(path, most_bytes=1000, most_days=1e6)
    store.put("mine", "resp_1", b"{}", ITEMS)
    await store.find("mine", "resp_1")
    assert (await other.find("mine", "resp_1")).items == ITEMS
    other.close()
    assert path.stat().st_mode & 0o077 == 0
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM responses").fetchone() == (1,)


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    for path in (tmp_path / "nowhere" / "responses.db", tmp_path / "text"):
        with pytest.raises(ConfigError, match="cannot keep responses"):
            ResponseStore(path, most_bytes=1, most_days=1)


async def test_nothing_grows_older_than_it_may(store: ResponseStore, clock: Clock) -> None:
    store.put("mine", "old", b"{}", [])
    clock.now_s += DAY_S
    store.put("mine", "young", b"{}", [])
    assert await names_in(store, "mine", ["old", "young"]) == ["old", "young"]
    clock.now_s += 1.5 * DAY_S
    assert await names_in(store, "mine", ["old", "young"]) == ["young"]
