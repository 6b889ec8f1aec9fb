"""Stored and background responses: an SQLite store, and the routes to get, list, cancel and delete them. The
store is bounded in bytes and age per key. Gateways of one machine may share its file
(docs/decisions/0028)."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.database import Database, committed
from services.gateway.errors import ClientGone, HttpError, shown
from services.gateway.http.middleware import RECORD, RequestRecord
from services.gateway.lasting.desk import Kept, LastingDesk, name_of
from services.gateway.openai.responses import listed_items
from shared.clock import unix_s
from shared.errors import InvalidRequest

_log = getLogger("kvasir.gateway.responses")
_DAY_S = 86_400.0

_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    key TEXT NOT NULL, id TEXT NOT NULL, kept_s REAL NOT NULL, bytes INTEGER NOT NULL,
    body BLOB NOT NULL, items BLOB NOT NULL, PRIMARY KEY (key, id));
CREATE INDEX IF NOT EXISTS by_age ON responses (key, kept_s, bytes);
"""
_PUT = "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)"
_FORGET_OLD = "DELETE FROM responses WHERE kept_s < ?"
_FORGET_MOST = """
DELETE FROM responses WHERE rowid IN (SELECT rowid FROM (
    SELECT rowid, sum(bytes) OVER (ORDER BY kept_s DESC, rowid DESC) AS total FROM responses WHERE key = ?)
WHERE total > ?)
"""


class StoredResponse(NamedTuple):
    """One stored answer."""

    body: bytes
    items: list[Any]
    """Conversation including the answer, in the form of `input`."""


def not_found(name: str, why: str = "it was never stored, was deleted, or has grown too old") -> HttpError:
    return HttpError(
        404, f"there is no response {shown(name, 100)!r}: {why}", error_code="response_not_found"
    )


class ResponseStore:
    """Store of responses. `key` is the digest of an API key."""

    def __init__(
        self, path: Path, *, most_bytes: int, most_days: float, now_s: Callable[[], float] = unix_s
    ) -> None:
        """`most_bytes` is the limit per key. Raises ConfigError for an unusable file."""
        self._most_bytes = most_bytes
        self._most_age_s = most_days * _DAY_S
        self._now_s = now_s
        self._file = Database(path, _TABLES, of="stored_responses")
        self.close = self._file.close

    def put(self, key: str, name: str, body: bytes, items: list[Any]) -> Future[None]:
        """Store; the future is done when it is committed, or could not be, which is logged."""
        now_s = self._now_s()

        def do(file: sqlite3.Connection) -> None:
            packed = orjson.dumps(items)
            file.execute(_PUT, (key, name, now_s, len(body) + len(packed), body, packed))
            file.execute(_FORGET_OLD, (now_s - self._most_age_s,))
            file.execute(_FORGET_MOST, (key, self._most_bytes))

        kept = self._file.submit(do)
        kept.add_done_callback(partial(_log_failure, name))
        return kept

    async def find(self, key: str, name: str) -> StoredResponse:
        """Return the key's response. Raises HttpError 404 if it has none of that name."""
        asked = (key, name, self._now_s() - self._most_age_s)
        of = "FROM responses WHERE key = ? AND id = ? AND kept_s >= ?"
        row = await self._file.run(lambda file: file.execute(f"SELECT body, items {of}", asked).fetchone())
        if row is None:
            raise not_found(name)
        return StoredResponse(row[0], orjson.loads(row[1]))

    async def delete(self, key: str, name: str) -> None:
        """Raises HttpError 404 if the key has none of that name."""
        asked = "DELETE FROM responses WHERE key = ? AND id = ?"
        if not await self._file.run(lambda file: file.execute(asked, (key, name)).rowcount):
            raise not_found(name)


def _log_failure(name: str, kept: Future[None]) -> None:
    if (error := kept.exception()) is not None:
        _log.error("the response %s was not stored: %s", name, error)


_OFF = "this server stores none (gateway.stored_responses names no file)"
_LOST = "the server ended before this response was complete: ask for it again"


class _Head(msgspec.Struct):
    status: str
    background: bool = False


_head = msgspec.json.Decoder(_Head).decode


class StoredResponses:
    """Stored responses as clients see them. `key` is the digest of an API key."""

    def __init__(self, store: ResponseStore, desk: LastingDesk) -> None:
        self._store = store
        self._desk = desk

    async def find(self, key: str, name: str) -> StoredResponse:
        """Return the response. One that no gateway works on any more becomes failed. Raises HttpError 404."""
        found = await self._store.find(key, name)
        if not _is_open(found) or await self._desk.is_made(name_of(key, "response", name)):
            return found
        how = {"status": "failed", "error": {"code": "server_error", "message": _LOST}}
        return await self._ended(key, name, how)

    async def cancel(self, key: str, name: str) -> StoredResponse:
        """Cancel a background response; an ended one is unchanged. Raises HttpError 404, InvalidRequest for
        one not in the background, UnavailableError."""
        found = await self.find(key, name)
        if not _head(found.body).background:
            text = "only a response that was asked for with background: true can be cancelled"
            raise InvalidRequest(text, param="response_id")
        if not _is_open(found):
            return found
        await self._desk.cancel(name_of(key, "response", name))
        return await self._ended(key, name, {"status": "cancelled"})

    async def delete(self, key: str, name: str) -> None:
        """Cancel the response if it is in progress, and delete it. Raises HttpError 404, UnavailableError."""
        if _is_open(await self._store.find(key, name)):
            await self._desk.cancel(name_of(key, "response", name))
        await self._store.delete(key, name)

    async def _ended(self, key: str, name: str, how: dict[str, Any]) -> StoredResponse:
        """Store the given status unless the response has ended by itself."""
        found = await self._store.find(key, name)
        if not _is_open(found):
            return found
        body = orjson.dumps({**orjson.loads(found.body), **how})
        await committed(self._store.put(key, name, body, found.items))
        return StoredResponse(body, found.items)


def _is_open(found: StoredResponse) -> bool:
    return _head(found.body).status == "in_progress"


def add_stored(app: FastAPI, store: ResponseStore | None, desk: LastingDesk) -> None:
    """Add the routes. Without `store`, they find only events of responses in progress."""
    responses = None if store is None else StoredResponses(store, desk)

    def of(name: str) -> StoredResponses:
        if responses is None:
            raise not_found(name, _OFF)
        return responses

    @app.get("/v1/responses/{name}")
    async def stored(name: str, request: Request) -> Response:
        record: RequestRecord = request.scope[RECORD]
        if request.query_params.get("stream") != "true":
            return written_json((await of(name).find(record.tenant, name)).body)
        asked = request.query_params.get("starting_after")
        if asked is not None and not (asked.isdecimal() and len(asked) < 10):
            raise InvalidRequest("starting_after should be the number of an event", param="starting_after")
        called = name_of(record.tenant, "response", name)
        async with desk.turn(called):
            kept = await desk.find(called)
        if kept is None:
            raise not_found(name, "its events are known while it is made, and for a while after")
        return Following(desk, kept, record, -1 if asked is None else int(asked))

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(name: str, request: Request) -> Response:
        found = await of(name).find(request.scope[RECORD].tenant, name)
        said = len(orjson.loads(found.body)["output"])
        items = found.items[: len(found.items) - said]
        return written_json(orjson.dumps(listed_items(name, items, request.query_params)))

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(name: str, request: Request) -> Response:
        return written_json((await of(name).cancel(request.scope[RECORD].tenant, name)).body)

    @app.delete("/v1/responses/{name}")
    async def delete(name: str, request: Request) -> Response:
        await of(name).delete(request.scope[RECORD].tenant, name)
        return written_json(orjson.dumps({"id": name, "object": "response", "deleted": True}))


def written_json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


class Following(Response):
    """Response that reads one lasting answer, for any connection."""

    def __init__(self, desk: LastingDesk, kept: Kept, record: RequestRecord, after: int = -1) -> None:
        """Events up to the number `after` are skipped; -1 skips none."""
        super().__init__()
        self._desk = desk
        self._kept = kept
        self._record = record
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if self._record.method == "POST":  # a repeated request reads what the first one ignored
                self._record.ignored = self._kept.ignored
            await send(message)

        is_complete = False
        self._kept.readers += 1
        try:
            is_complete = await self._kept.transcript.read(send_on, _gone(receive), self._after)
            self._record.is_gone = not is_complete
        except ClientGone:
            self._record.is_gone = True
        finally:
            self._desk.leave(self._kept, is_complete=is_complete)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
