"""Runs batches: each line is a request of the class `sheddable`, so that interactive ones go first."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from logging import getLogger
from secrets import token_hex
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Scope

from services.gateway.batches.store import WINDOW_S, BatchStore, StoredBatch
from services.gateway.errors import HttpError
from services.gateway.http.middleware import TRUSTED
from shared.bus import fenced
from shared.clock import unix_s
from shared.messages.sequence import ServiceClass, Tenant

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_LINES = 50_000
_AT_ONCE = 16
_LOOK_S = _RENEW_S = 1.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 15.0
_BUSY = (429, 503)
"""Statuses after which a line is asked again."""
_MOST_PROBLEMS = 20
_log = getLogger("kvasir.gateway.batches")


class BatchLine(NamedTuple):
    """One request of a batch; `number` counts from 1."""

    number: int
    custom_id: str
    body: bytes


class Answered(NamedTuple):
    """What the gateway answered to a line."""

    status: int
    request_id: str
    wait_s: float
    body: bytes


class BatchRunner:
    """Runs one batch after the other, `_AT_ONCE` lines at once, until cancelled."""

    def __init__(self, store: BatchStore, app: ASGIApp, tenants: Mapping[str, Tenant]) -> None:
        """`app` answers HTTP requests; `tenants` are by key digest."""
        self._store = store
        self._app = app
        self._tenants = tenants
        self._owner = token_hex(8)

    async def run(self) -> None:
        while True:
            with fenced("batches"):
                while (batch := await self._store.take(self._owner)) is not None:
                    await self._run_leased(batch)
            await asyncio.sleep(_LOOK_S)

    async def _run_leased(self, batch: StoredBatch) -> None:
        """Work on a batch while its lease lasts and nobody has cancelled it."""
        work = asyncio.create_task(self._work(batch), name=f"batch {batch.id}")
        try:
            while not (await asyncio.wait({work}, timeout=_RENEW_S))[0]:
                state = await self._store.renew(self._owner, batch.id)
                if state == "in_progress" or (state == "validating" and not work.done()):
                    continue
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                if state == "cancelling":
                    await self._store.end(self._owner, batch, "cancelled")
                return
            await work
        finally:
            work.cancel()

    async def _work(self, batch: StoredBatch) -> None:
        if batch.state == "cancelling":
            await self._store.end(self._owner, batch, "cancelled")
            return
        owner = self._tenants.get(batch.key)
        if owner is None:
            await self._fail(batch, [_problem("key_revoked", "the key of this batch was revoked", None)])
            return
        try:
            content = await self._store.content(batch.key, batch.input)
        except HttpError as error:
            await self._fail(batch, [_problem("file_deleted", str(error), None)])
            return
        lines, problems = read_lines(content, batch.endpoint)
        if problems:
            await self._fail(batch, problems)
            return
        await self._store.start(batch.id, len(lines))
        done = await self._store.answered(batch.id)
        waiting = iter([line for line in lines if line.number not in done])
        asking = Tenant(name=owner.name, service_class=ServiceClass.SHEDDABLE, weight=owner.weight)
        until_s = batch.created_s + WINDOW_S

        async def ask_next() -> None:
            for line in waiting:
                content, is_good = await self._ask(batch, line, asking, until_s)
                if not content:
                    return
                await self._store.put_answer(batch.id, line.number, content, is_good=is_good)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(ask_next())
        await self._store.end(self._owner, batch, "completed" if unix_s() < until_s else "expired")

    async def _fail(self, batch: StoredBatch, problems: list[dict[str, Any]]) -> None:
        await self._store.end(self._owner, batch, "failed", orjson.dumps(problems).decode())

    async def _ask(
        self, batch: StoredBatch, line: BatchLine, asking: Tenant, until_s: float
    ) -> tuple[bytes, bool]:
        """Return the line of the output, and whether it is an answer; empty past the window."""
        wait_s = _FIRST_WAIT_S
        while unix_s() < until_s:
            answered = await self._call(batch, line, asking)
            if answered.status not in _BUSY:
                told = {
                    "id": f"batch_req_{token_hex(12)}",
                    "custom_id": line.custom_id,
                    "response": {
                        "status_code": answered.status,
                        "request_id": answered.request_id,
                        "body": orjson.loads(answered.body or b"null"),
                    },
                    "error": None,
                }
                return orjson.dumps(told), answered.status == 200
            await asyncio.sleep(max(wait_s, answered.wait_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return b"", False

    async def _call(self, batch: StoredBatch, line: BatchLine, asking: Tenant) -> Answered:
        parts: list[Message] = []
        body: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            parts.append(message)

        path = batch.endpoint
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            TRUSTED: (batch.key, asking),
        }
        try:
            await self._app(scope, receive, send)
        finally:
            gone.set()
        headers = {name.decode(): value.decode() for name, value in parts[0]["headers"]}
        whole = b"".join(part.get("body", b"") for part in parts[1:])
        wait = headers.get("retry-after", "0")
        wait_s = float(wait) if wait.isdecimal() else 0.0
        return Answered(parts[0]["status"], headers.get("x-request-id", ""), wait_s, whole)


def read_lines(content: bytes, endpoint: str) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """Return the requests of an input file, and what is wrong with it, in the form of the API."""
    lines: list[BatchLine] = []
    problems: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip() or len(problems) >= _MOST_PROBLEMS:
            continue
        try:
            line = _line(number, text, endpoint, seen)
        except ValueError as error:
            problems.append(_problem("invalid_line", str(error), number))
            continue
        seen.add(line.custom_id)
        lines.append(line)
    if len(lines) > MOST_LINES:
        problems.append(_problem("too_many_lines", f"at most {MOST_LINES} requests a batch", None))
    if not lines and not problems:
        problems.append(_problem("empty_file", "the input file has no requests", None))
    return lines, problems


def _line(number: int, text: bytes, endpoint: str, seen: set[str]) -> BatchLine:
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise ValueError("write a JSON object: custom_id, method, url, body")
    custom_id, body = told.get("custom_id"), told.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id should be a text of your own")
    if custom_id in seen:
        raise ValueError(f"custom_id {custom_id[:64]!r} occurs twice")
    if told.get("method", "POST") != "POST" or told.get("url") != endpoint:
        raise ValueError(f"method should be POST and url {endpoint}, as the batch's endpoint")
    if not isinstance(body, dict):
        raise ValueError(f"body should be the request to {endpoint}")
    if body.get("stream"):
        raise ValueError("answers of a batch are not streamed: leave out stream")
    return BatchLine(number, custom_id, orjson.dumps(body))


def _problem(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
