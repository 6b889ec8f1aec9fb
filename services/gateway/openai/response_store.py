"""Answers of the Responses API that are kept, each with the conversation that it ends: one SQLite file.

Off unless a file is named. Every key has answers of its own, bounded in bytes and age: the oldest leave. The
file is read and written on one thread, one thing after the other, so that whoever asks finds what was put
before; several gateways of one machine may share it. Why SQLite: docs/decisions/0028.
"""

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
"""For another gateway to let go of the file."""
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
    """One that is kept."""

    body: bytes
    """As it was answered."""
    items: list[Any]
    """The conversation up to and with it, as `input` takes it."""


def not_found(name: str, why: str = "it was never stored, was deleted, or has grown too old") -> HttpError:
    """The error for a response that is not there."""
    return HttpError(
        404, f"there is no response {shown(name, 100)!r}: {why}", error_code="response_not_found"
    )


class ResponseStore:
    """See above. `key` is the digest of an API key."""

    def __init__(
        self, path: Path, *, most_bytes: int, most_days: float, now_s: Callable[[], float] = unix_s
    ) -> None:
        """`most_bytes` is for each key. Raises ConfigError for a file that cannot be used."""
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
        """Returns at once; what goes wrong is logged."""
        self._thread.submit(self._put, key, name, body, items)

    async def find(self, key: str, name: str) -> StoredResponse:
        """Raises HttpError 404 when that key has none of that name."""
        return await self._on_thread(lambda: self._find(key, name))

    async def delete(self, key: str, name: str) -> None:
        """Raises as `find`."""
        await self._on_thread(lambda: self._delete(key, name))

    def close(self) -> None:
        """After what was put."""
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
