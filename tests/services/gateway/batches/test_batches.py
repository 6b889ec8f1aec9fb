"""Files and batches: what is kept for whom, who works on what, and what is wrong with an input file."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from services.gateway.batches.routes import batch_object, read_form
from services.gateway.batches.runner import BatchRunner, read_lines
from services.gateway.batches.store import LEASE_S, BatchStore
from services.gateway.errors import HttpError
from shared.errors import ConfigError, InvalidRequest
from shared.messages.sequence import NOBODY
from tests.patience import PATIENCE_S
from tests.services.gateway.conftest import Clock

CHATS = "/v1/chat/completions"
DAY_S = 86_400.0


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[BatchStore]:
    made = BatchStore(tmp_path / "batches.sqlite", most_bytes=100, most_days=1.0, now_s=clock)
    yield made
    made.close()


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await play()

    asyncio.run(all_of_it())


def line(custom_id: object = "a", **more: object) -> bytes:
    told = {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": {"model": "m"}}
    return json.dumps({**told, **more}).encode()


def test_a_key_finds_its_own_files_only_within_bytes_and_days(store: BatchStore, clock: Clock) -> None:
    async def play() -> None:
        file = await store.add_file("one", "in.jsonl", "batch", b"x" * 60)
        assert await store.content("one", file.id) == b"x" * 60
        for whose, name in (("two", file.id), ("one", "file-none")):
            with pytest.raises(HttpError) as refused:
                await store.content(whose, name)
            assert refused.value.status == 404
        with pytest.raises(HttpError) as refused:
            await store.add_file("one", "more", "batch", b"x" * 41)
        assert refused.value.status == 413
        await store.add_file("two", "its own", "batch", b"x" * 100)
        clock.now_s += DAY_S + 1
        await store.add_file("one", "more", "batch", b"x" * 100)
        assert [each.name for each in await store.files("one", None)] == ["more"]
        with pytest.raises(HttpError):
            await store.delete_file("two", (await store.files("one", "batch"))[0].id)

    run(play)


def test_one_gateway_at_a_time_works_on_a_batch_and_another_goes_on(store: BatchStore, clock: Clock) -> None:
    async def play() -> None:
        file = await store.add_file("one", "in", "batch", b"x")
        begun = await store.begin("one", file.id, CHATS, "{}")
        first = await store.take("gateway-0")
        assert first is not None and first.id == begun.id
        assert await store.take("gateway-1") is None
        await store.start(begun.id, 3)
        await store.put_answer(begun.id, 2, b"two", is_good=True)
        clock.now_s += LEASE_S - 1
        assert await store.renew("gateway-0", begun.id) == "in_progress"
        clock.now_s += LEASE_S + 1  # gateway-0 died
        second = await store.take("gateway-1")
        assert second is not None and (second.completed, second.failed, second.total) == (1, 0, 3)
        assert await store.answered(begun.id) == {2}
        assert await store.renew("gateway-0", begun.id) == ""
        await store.put_answer(begun.id, 2, b"late", is_good=False)  # the first answer stays
        await store.put_answer(begun.id, 1, b"one", is_good=True)
        await store.put_answer(begun.id, 3, b"bad", is_good=False)
        await store.end("gateway-0", second, "failed")  # it is not its batch any more
        assert (await store.batch("one", begun.id)).state == "in_progress"
        await store.end("gateway-1", second, "completed")
        await store.put_answer(begun.id, 2, b"later", is_good=True)
        assert await store.answered(begun.id) == set()
        ended = await store.batch("one", begun.id)
        assert (ended.state, ended.completed, ended.failed) == ("completed", 2, 1)
        assert ended.output is not None and ended.errors is not None
        assert await store.content("one", ended.output) == b"one\ntwo\n"
        assert await store.content("one", ended.errors) == b"bad\n"
        assert await store.take("gateway-1") is None
        shown = batch_object(ended)
        assert shown["completed_at"] == int(clock.now_s) and shown["failed_at"] is None
        assert (await store.cancel("one", begun.id)).state == "completed"

    run(play)


def test_a_cancelled_batch_is_seen_by_who_works_on_it(store: BatchStore) -> None:
    async def play() -> None:
        file = await store.add_file("one", "in", "batch", b"x")
        begun = await store.begin("one", file.id, CHATS, "{}")
        taken = await store.take("gateway-0")
        assert taken is not None
        await store.start(begun.id, 1)
        with pytest.raises(HttpError):
            await store.cancel("two", begun.id)
        assert (await store.cancel("one", begun.id)).state == "cancelling"
        assert await store.renew("gateway-0", begun.id) == "cancelling"
        await store.end("gateway-0", taken, "cancelled")
        ended = await store.batch("one", begun.id)
        assert (ended.state, ended.output) == ("cancelled", None)

    run(play)


def test_a_batch_fails_without_its_input_file_or_its_key(store: BatchStore) -> None:
    async def app(*_: object) -> None:
        raise AssertionError("nothing is asked")

    async def play() -> None:
        file = await store.add_file("one", "in", "batch", line())
        for tenants, code in (({}, "key_revoked"), ({"one": NOBODY}, "file_deleted")):
            begun = await store.begin("one", file.id, CHATS, "{}")
            if tenants:
                await store.delete_file("one", file.id)
            async with asyncio.timeout(PATIENCE_S):
                running = asyncio.create_task(BatchRunner(store, app, tenants).run())
                while (ended := await store.batch("one", begun.id)).state != "failed":
                    await asyncio.sleep(0.01)
            running.cancel()
            assert json.loads(ended.problems)[0]["code"] == code

    run(play)


def test_batches_are_listed_from_the_newest_and_a_store_is_opened_or_refused(
    store: BatchStore, clock: Clock, tmp_path: Path
) -> None:
    async def play() -> None:
        file = await store.add_file("one", "in", "batch", b"x")
        names = []
        for _ in range(4):
            clock.now_s += 1
            names.append((await store.begin("one", file.id, CHATS, "{}")).id)
        found = [each.id for each in await store.batches("one", None, 3)]
        assert found == names[:0:-1]
        assert [each.id for each in await store.batches("one", found[-1], 3)] == names[:1]
        assert await store.batches("two", None, 3) == []

    run(play)
    with pytest.raises(ConfigError, match=r"cannot be used.*without gateway\.batches"):
        BatchStore(tmp_path, most_bytes=1, most_days=1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the input file has no requests"),
        (b"{", "this is not JSON"),
        (b"[]", "write a JSON object"),
        (line(""), "custom_id should be a text of your own"),
        (line(7), "custom_id should be a text of your own"),
        (line() + b"\n" + line(), "custom_id 'a' occurs twice"),
        (line(method="GET"), "method should be POST and url /v1/chat/completions"),
        (line(url="/v1/embeddings"), "method should be POST and url /v1/chat/completions"),
        (line(body=[]), "body should be the request to /v1/chat/completions"),
        (line(body={"stream": True}), "answers of a batch are not streamed"),
    ],
)
def test_what_is_wrong_with_an_input_file_is_said_by_line(content: bytes, problem: str) -> None:
    _, problems = read_lines(content, CHATS)
    assert problems[0]["message"].startswith(problem)
    assert problems[0]["line"] == (content.count(b"\n") + 1 if content else None)


def test_empty_lines_count_but_are_no_requests() -> None:
    lines, problems = read_lines(b"\n" + line("a") + b"\r\n\n" + line("b"), CHATS)
    assert problems == [] and [(each.number, each.custom_id) for each in lines] == [(2, "a"), (4, "b")]
    assert lines[0].body == b'{"model":"m"}'


BOUNDARY = "multipart/form-data; boundary=b"


def form(**fields: str) -> bytes:
    parts = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
        for name, value in fields.items()
        for more in ('; filename="in.jsonl"' if name == "file" else "",)
    ]
    return ("".join(parts) + "--b--\r\n").encode()


def test_an_upload_is_read_byte_by_byte_or_refused_by_field() -> None:
    content = "é\n\n{}\r\n--c\r\n"
    assert read_form(BOUNDARY, form(purpose="batch", file=content)) == ("in.jsonl", "batch", content.encode())
    for kind, body, says in (
        ("application/json", b"{}", "send multipart/form-data"),
        (BOUNDARY, form(purpose="batch"), "no field file"),
        (BOUNDARY, form(purpose="fine-tune", file="x"), "purpose should be batch, not 'fine-tune'"),
        ("multipart/form-data", b"nothing", "no field file"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            read_form(kind, body)
