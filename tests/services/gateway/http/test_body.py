"""Bodies: size, time, and form."""

import asyncio
import time
import tracemalloc
import zlib
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive

from services.gateway.config import GatewayConfig
from services.gateway.errors import HttpError
from services.gateway.http import bodies
from services.gateway.http.bodies import inflated, read_body
from services.gateway.openai.schemas import MAX_ENTRIES, MAX_VALUES, parse_object
from services.gateway.text.tokenizer import TokenizerThreads
from shared.errors import InvalidRequest


def arriving(parts: Iterable[bytes], *, ends: bool = True, gone: bool = False) -> Receive:
    """A `receive` that gives the parts, then the end, a disconnect, or nothing."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if gone:
        messages.append({"type": "http.disconnect"})
    elif ends:
        messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    return receive


async def read(
    receive: Receive, length: str | None = None, encoding: str | None = None, most_bytes: int = 10
) -> bytes:
    found = {b"content-length": length, b"content-encoding": encoding}
    headers = [(name, value.encode()) for name, value in found.items() if value is not None]
    threads = TokenizerThreads(1, 4)
    try:
        config = GatewayConfig.model_validate({"max_body_bytes": most_bytes, "receive_timeout_s": 0.1})
        return await read_body(Request({"type": "http", "headers": headers}, receive), config, threads)
    finally:
        threads.close()


@pytest.mark.parametrize("length", [None, "11", "nonsense", "-5"])
async def test_over_the_cap_is_413_after_the_client_has_said_it_all(length: str | None) -> None:
    with pytest.raises(HttpError) as caught:
        await read(arriving([b"x" * 6, b"x" * 5]), length)
    assert (caught.value.status, caught.value.closes) == (413, True)


async def test_far_over_the_cap_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_DISCARDED_BYTES", 100)
    with pytest.raises(HttpError) as caught:
        await read(arriving([], ends=False), "111")
    assert caught.value.status == 413
    with pytest.raises(HttpError) as caught:
        await read(arriving([b"x" * 60] * 2, ends=False))
    assert caught.value.status == 413


def packed(content: bytes, bits: int) -> bytes:
    packing = zlib.compressobj(wbits=bits)
    return packing.compress(content) + packing.flush()


GZIP, ZLIB, RAW = 31, 15, -15


@pytest.mark.parametrize(
    ("encoding", "bits"), [("gzip", GZIP), (" X-GZIP", GZIP), ("deflate", ZLIB), ("deflate", RAW)]
)
async def test_a_packed_body_is_inflated_up_to_the_cap(encoding: str, bits: int) -> None:
    """A body in gzip was refused for its UTF-8; and a megabyte of zeros is a kilobyte in it."""
    for content in (b"", b'{"a": "b"}'):
        assert await read(arriving([packed(content, bits)]), encoding=encoding, most_bytes=40) == content
    with pytest.raises(HttpError, match="inflated") as caught:
        await read(arriving([packed(b"{" * 999, bits)]), encoding=encoding, most_bytes=40)
    assert (caught.value.status, caught.value.closes) == (413, False)


async def test_a_body_of_several_members_is_read_up_to_the_cap() -> None:
    """As `cat a.gz b.gz`, pigz and bgzip write them."""
    members = [packed(content, GZIP) for content in (b'{"a": ', b"", b"1" * 9, b"}")]
    assert await read(arriving([b"".join(members)]), encoding="gzip", most_bytes=300) == b'{"a": 111111111}'
    with pytest.raises(HttpError, match="inflated"):
        inflated(packed(b"x" * 9, GZIP) * 100, 500)
    began_s = time.process_time()
    assert inflated(packed(b"", GZIP) * 100_000, 10) == b""
    assert time.process_time() - began_s < 5, "the rest is not copied at the end of each member"


def test_of_a_bomb_no_more_than_the_cap_is_made() -> None:
    bomb = packed(bytes(64 * 1024 * 1024), GZIP)
    tracemalloc.start()
    with pytest.raises(HttpError, match="longer than 1000 bytes"):
        inflated(bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (packed(b"{}", GZIP)[:-3], "cut off"),
        (packed(b"{}", GZIP) + b"x", "more after its end"),
        (packed(b"{}", ZLIB) * 2, "more after its end"),
        (packed(b"{}", GZIP) + packed(b"{}", GZIP)[:-3], "cut off"),
        (b"no gzip", "cannot be inflated"),
        (b"", "cut off"),
    ],
)
def test_what_cannot_be_inflated(body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        inflated(body, 1000)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 500])
async def test_other_encodings_are_415(encoding: str) -> None:
    with pytest.raises(HttpError, match="gzip or deflate") as caught:
        await read(arriving([b"{}"]), encoding=encoding)
    assert caught.value.status == 415 and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b'{"a": "\xe9"}', b'{"a": "\\ud800"}', b"{'a': 1}", b"\xff"],
)
def test_anything_else(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_object(content)


def test_entries_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty lists are four megabytes, and half a second in which no stream gets a token."""

    def parse(content: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(orjson, "loads", parse)
    for content in (
        b'{"a": [' + b"[]," * MAX_ENTRIES + b"1]}",
        b'{"a": {' + b'"b" :0,' * MAX_ENTRIES + b'"c": 0}}',
        b'{"messages": [' + b'{"role":"user","content":""},' * (MAX_ENTRIES // 2) + b"{}]}",
        b'{"a": "\\\\", "b": [' + b'"\\"",[],' * MAX_ENTRIES + b"1]}",
    ):
        with pytest.raises(InvalidRequest, match=f"more than {MAX_ENTRIES} objects, lists and named fields"):
            parse_object(content)


def test_plain_values_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million numbers are four megabytes as well, and 0.7 s in which no stream got a token."""
    most = b'{"a": [' + b"1," * MAX_VALUES
    assert len(parse_object(most + b"1]}")["a"]) == MAX_VALUES + 1
    monkeypatch.setattr(orjson, "loads", None)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        parse_object(most + b"1,1]}")


def test_what_is_in_texts_is_no_entry() -> None:
    text = "{[:, " * MAX_VALUES
    for whole in (text, f'"{text}', f"\\{text}", f'\\"{text}\\'):
        assert parse_object(orjson.dumps({"prompt": whole, "n": 1})) == {"prompt": whole, "n": 1}
    tokens = list(range(8 * MAX_ENTRIES))
    assert parse_object(orjson.dumps({"prompt": tokens})) == {"prompt": tokens}


@given(
    st.recursive(
        st.text('\\"{[:]},a'), lambda deeper: st.lists(deeper) | st.dictionaries(st.text('\\":'), deeper)
    )
)
def test_entries_are_counted_exactly(content: Any) -> None:
    def entries(part: Any) -> int:
        if isinstance(part, dict):
            return 1 + len(part) + sum(map(entries, part.values()))
        return 1 + sum(map(entries, part)) if isinstance(part, list) else 0

    whole = {"a": content}
    count = entries(whole)
    assert parse_object(orjson.dumps(whole), count) == whole
    with pytest.raises(InvalidRequest, match="send fewer"):
        parse_object(orjson.dumps(whole), count - 1)
