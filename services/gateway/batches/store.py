"""SQLite store of uploaded files, and of batches with the answers that they have so far. One thread does all
reads and writes in order. Gateways of one machine share the file; a lease says which of them runs a batch."""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

from services.gateway.errors import HttpError, shown
from shared.clock import unix_s
from shared.errors import ConfigError

LEASE_S = 10.0
MOST_LISTED = 100
_BUSY_S = 5.0
_DAY_S = 86_400.0
WINDOW_S = _DAY_S
OPEN = ("validating", "in_progress", "cancelling")
"""States of a batch that a gateway works on."""
T = TypeVar("T")

_TABLES = """
PRAGMA journal_mode = wal;
PRAGMA secure_delete = on;
CREATE TABLE IF NOT EXISTS files (
    key TEXT NOT NULL, id TEXT NOT NULL PRIMARY KEY, name TEXT NOT NULL, purpose TEXT NOT NULL,
    created_s REAL NOT NULL, bytes INTEGER NOT NULL, content BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_by_key ON files (key, created_s);
CREATE TABLE IF NOT EXISTS batches (
    key TEXT NOT NULL, id TEXT NOT NULL PRIMARY KEY, input TEXT NOT NULL, endpoint TEXT NOT NULL,
    state TEXT NOT NULL, created_s REAL NOT NULL, began_s REAL, ended_s REAL,
    total INTEGER NOT NULL DEFAULT 0,
    output TEXT, errors TEXT, problems TEXT NOT NULL DEFAULT '', metadata TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT '', leased_until_s REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, is_good INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (batch, line));
"""


class File(NamedTuple):
    """An uploaded file, or the output of a batch."""

    id: str
    name: str
    purpose: str
    created_s: float
    bytes: int


class StoredBatch(NamedTuple):
    """One row of the table; times are Unix seconds."""

    key: str
    id: str
    input: str
    endpoint: str
    state: str
    created_s: float
    began_s: float | None
    ended_s: float | None
    total: int
    output: str | None
    errors: str | None
    problems: str
    """JSON of what validation found; empty: nothing."""
    metadata: str
    completed: int = 0
    failed: int = 0


_BATCH = ", ".join(name for name in StoredBatch._fields if name not in ("completed", "failed"))
_FILE = ", ".join(File._fields)


class BatchStore:
    """The store. `key` is the digest of an API key; what another key stored is not found."""

    def __init__(
        self, path: Path, *, most_bytes: int, most_days: float, now_s: Callable[[], float] = unix_s
    ) -> None:
        """`most_bytes` is the limit per key, `most_days` how long files and ended batches stay. Raises
        ConfigError for an unusable file."""
        self._most_bytes = most_bytes
        self._most_age_s = most_days * _DAY_S
        self._now_s = now_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path} cannot keep batches: {error}", param="batches") from error

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._db.close()

    async def _on_thread(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    # --- files

    async def add_file(self, key: str, name: str, purpose: str, content: bytes) -> File:
        """Store a file. Raises HttpError 413 if the key's files would be too large together."""

        def do() -> File:
            now_s = self._now_s()
            with self._db:
                self._forget_old(now_s)
                held = (
                    self._db.execute("SELECT sum(bytes) FROM files WHERE key = ?", (key,)).fetchone()[0] or 0
                )
                if held + len(content) > self._most_bytes:
                    most_mb = self._most_bytes / 1e6
                    text = f"your files would be larger than {most_mb:.0f} MB together: delete some first"
                    raise HttpError(413, text, error_code="files_too_large")
                return self._put_file(key, name, purpose, content, now_s)

        return await self._on_thread(do)

    async def files(self, key: str, purpose: str | None) -> list[File]:
        """Return the key's files, the newest first."""
        asked = (
            f"SELECT {_FILE} FROM files WHERE key = ? AND (? IS NULL OR purpose = ?) ORDER BY created_s DESC"
        )
        return await self._on_thread(
            lambda: [File(*row) for row in self._db.execute(asked, (key, purpose, purpose))]
        )

    async def file(self, key: str, name: str) -> File:
        return (await self._read_file(key, name))[0]

    async def content(self, key: str, name: str) -> bytes:
        return (await self._read_file(key, name))[1]

    async def delete_file(self, key: str, name: str) -> None:
        def do() -> int:
            with self._db:
                return self._db.execute("DELETE FROM files WHERE key = ? AND id = ?", (key, name)).rowcount

        if not await self._on_thread(do):
            raise _not_found("file", name)

    async def _read_file(self, key: str, name: str) -> tuple[File, bytes]:
        asked = f"SELECT {_FILE}, content FROM files WHERE key = ? AND id = ?"
        row = await self._on_thread(lambda: self._db.execute(asked, (key, name)).fetchone())
        if row is None:
            raise _not_found("file", name)
        return File(*row[:-1]), row[-1]

    def _put_file(self, key: str, name: str, purpose: str, content: bytes, now_s: float) -> File:
        file = File(f"file-{token_hex(12)}", name, purpose, now_s, len(content))
        self._db.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (key, file.id, name, purpose, now_s, len(content), content),
        )
        return file

    def _forget_old(self, now_s: float) -> None:
        before_s = now_s - self._most_age_s
        self._db.execute("DELETE FROM files WHERE created_s < ?", (before_s,))
        self._db.execute("DELETE FROM batches WHERE ended_s < ?", (before_s,))

    # --- batches, as clients see them

    async def begin(self, key: str, input_file: str, endpoint: str, metadata: str) -> StoredBatch:
        """Store a new batch. Raises HttpError 404 without the file."""
        await self.file(key, input_file)
        name = f"batch_{token_hex(12)}"

        def do() -> None:
            with self._db:
                self._db.execute(
                    "INSERT INTO batches (key, id, input, endpoint, state, created_s, metadata)"
                    " VALUES (?, ?, ?, ?, 'validating', ?, ?)",
                    (key, name, input_file, endpoint, self._now_s(), metadata),
                )

        await self._on_thread(do)
        return await self.batch(key, name)

    async def batch(self, key: str, name: str) -> StoredBatch:
        asked = f"SELECT {_BATCH} FROM batches WHERE key = ? AND id = ?"
        row = await self._on_thread(lambda: self._counted(self._db.execute(asked, (key, name)).fetchall()))
        if not row:
            raise _not_found("batch", name)
        return row[0]

    async def batches(self, key: str, after: str | None, limit: int) -> list[StoredBatch]:
        """Return the key's batches, the newest first, those older than `after`."""
        asked = (
            f"SELECT {_BATCH} FROM batches WHERE key = ? AND (? IS NULL OR created_s < "
            "(SELECT created_s FROM batches WHERE id = ?)) ORDER BY created_s DESC LIMIT ?"
        )
        return await self._on_thread(
            lambda: self._counted(self._db.execute(asked, (key, after, after, limit)).fetchall())
        )

    async def cancel(self, key: str, name: str) -> StoredBatch:
        """Ask for a batch's end; one that has ended is unchanged."""

        def do() -> None:
            with self._db:
                self._db.execute(
                    "UPDATE batches SET state = 'cancelling' WHERE key = ? AND id = ? AND state IN"
                    " ('validating', 'in_progress')",
                    (key, name),
                )

        await self._on_thread(do)
        return await self.batch(key, name)

    def _counted(self, rows: Sequence[Any]) -> list[StoredBatch]:
        count = "SELECT coalesce(sum(is_good), 0), count(*) FROM answers WHERE batch = ?"
        batches = []
        for row in rows:
            good, answered = self._db.execute(count, (row[1],)).fetchone()
            batches.append(StoredBatch._make((*row, good, answered - good)))
        return batches

    # --- batches, as the gateway that runs one sees it

    async def take(self, owner: str) -> StoredBatch | None:
        """Lease the oldest batch that nobody works on, for `LEASE_S`; None: there is none."""
        asked = (
            f"SELECT {_BATCH} FROM batches WHERE state IN (?, ?, ?) AND leased_until_s < ?"
            " ORDER BY created_s LIMIT 1"
        )

        def do() -> StoredBatch | None:
            now_s = self._now_s()
            if not self._db.execute(asked, (*OPEN, now_s)).fetchall():
                return None  # without the lock that the next lines take
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                found = self._counted(self._db.execute(asked, (*OPEN, now_s)).fetchall())
                if not found:
                    return None
                lease = "UPDATE batches SET owner = ?, leased_until_s = ? WHERE id = ?"
                self._db.execute(lease, (owner, now_s + LEASE_S, found[0].id))
                return found[0]

        return await self._on_thread(do)

    async def renew(self, owner: str, name: str) -> str:
        """Renew the lease, and return the batch's state; empty: the lease is another's now."""

        def do() -> str:
            with self._db:
                renewed = self._db.execute(
                    "UPDATE batches SET leased_until_s = ? WHERE id = ? AND owner = ?",
                    (self._now_s() + LEASE_S, name, owner),
                )
                if not renewed.rowcount:
                    return ""
                return str(self._db.execute("SELECT state FROM batches WHERE id = ?", (name,)).fetchone()[0])

        return await self._on_thread(do)

    async def start(self, name: str, total: int) -> None:
        """Note that validation found `total` good lines."""

        def do() -> None:
            with self._db:
                self._db.execute(
                    "UPDATE batches SET total = ?, began_s = coalesce(began_s, ?), state = 'in_progress'"
                    " WHERE id = ? AND state = 'validating'",
                    (total, self._now_s(), name),
                )

        await self._on_thread(do)

    async def answered(self, name: str) -> set[int]:
        """Return the numbers of lines with an answer."""
        asked = "SELECT line FROM answers WHERE batch = ?"
        return await self._on_thread(lambda: {row[0] for row in self._db.execute(asked, (name,))})

    async def put_answer(self, name: str, line: int, content: bytes, *, is_good: bool) -> None:
        """Store an answer; the first one of a line stays."""

        def do() -> None:
            with self._db:
                insert = "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)"
                self._db.execute(insert, (name, line, int(is_good), content))

        await self._on_thread(do)

    async def end(self, owner: str, batch: StoredBatch, state: str, problems: str = "") -> None:
        """End a batch: its answers become files, in the order of its lines."""

        def do() -> None:
            now_s = self._now_s()
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                whose = self._db.execute("SELECT owner FROM batches WHERE id = ?", (batch.id,)).fetchone()
                if whose is None or whose[0] != owner:
                    return
                names: list[str | None] = []
                for is_good, kind in ((1, "output"), (0, "error")):
                    asked = "SELECT content FROM answers WHERE batch = ? AND is_good = ? ORDER BY line"
                    lines = [row[0] for row in self._db.execute(asked, (batch.id, is_good))]
                    file = f"{batch.id}_{kind}.jsonl"
                    content = b"".join(line + b"\n" for line in lines)
                    made = self._put_file(batch.key, file, "batch_output", content, now_s) if lines else None
                    names.append(made.id if made else None)
                self._db.execute(
                    "UPDATE batches SET state = ?, ended_s = ?, output = ?, errors = ?, problems = ?,"
                    " leased_until_s = 0 WHERE id = ?",
                    (state, now_s, *names, problems, batch.id),
                )

        await self._on_thread(do)


def _not_found(kind: str, name: str) -> HttpError:
    text = f"there is no {kind} {shown(name, 100)!r}: it never was, was deleted, or has grown too old"
    return HttpError(404, text, error_code=f"{kind}_not_found")
