"""SQLite store of Responses API answers, each with its conversation; bounded in bytes and age per key. One
thread does all reads and writes in order. Gateways of one machine may share the file
(docs/decisions/0028)."""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from services.gateway.errors import HttpError, shown
from shared.clock import unix_s
from shared.errors import ConfigError

_log = getLogger("kvasir.gateway.responses")
_BUSY_S = 5.0
"""Seconds to wait for another gateway's lock on the file."""
_DAY_S = 86_400.0
T = TypeVar("T")

_TABLES = """
PRAGMA journal_mode = wal;
PRAGMA secure_delete = on;
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stored responses")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._file = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
            self._file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path} cannot keep responses: {error}", param="stored_responses") from error

    def put(self, key: str, name: str, body: bytes, items: list[Any]) -> None:
        """Store in the background; errors are logged."""
        self._thread.submit(self._put, key, name, body, items)

    async def settle(self) -> None:
        """Wait until everything given to `put` is committed."""
        await self._on_thread(lambda: None)

    async def find(self, key: str, name: str) -> StoredResponse:
        """Return the key's response. Raises HttpError 404 if it has none of that name."""
        return await self._on_thread(lambda: self._find(key, name))

    async def delete(self, key: str, name: str) -> None:
        await self._on_thread(lambda: self._delete(key, name))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._file.close()

    async def _on_thread(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    def _put(self, key: str, name: str, body: bytes, items: list[Any]) -> None:
        now_s = self._now_s()
        try:
            packed = orjson.dumps(items)
            with self._file:
                self._file.execute(_PUT, (key, name, now_s, len(body) + len(packed), body, packed))
                self._file.execute(_FORGET_OLD, (now_s - self._most_age_s,))
                self._file.execute(_FORGET_MOST, (key, self._most_bytes))
        except (sqlite3.Error, orjson.JSONEncodeError) as error:
            _log.error("the response %s was not stored: %s", name, error)

    def _find(self, key: str, name: str) -> StoredResponse:
        asked = (key, name, self._now_s() - self._most_age_s)
        rows = self._file.execute(
            "SELECT body, items FROM responses WHERE key = ? AND id = ? AND kept_s >= ?", asked
        ).fetchall()
        if not rows:
            raise not_found(name)
        return StoredResponse(rows[0][0], orjson.loads(rows[0][1]))

    def _delete(self, key: str, name: str) -> None:
        with self._file:
            deleted = self._file.execute("DELETE FROM responses WHERE key = ? AND id = ?", (key, name))
        if deleted.rowcount == 0:
            raise not_found(name)
