"""SQLite store of uploaded files, and of batches with the answers that they have so far. Gateways of one
machine share it; a lease says which of them runs a batch."""

from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from sqlite3 import Connection
from typing import NamedTuple

from services.gateway.database import Database
from services.gateway.errors import HttpError, shown
from shared.clock import unix_s

LEASE_S = 10.0
MOST_LISTED = 100
_DAY_S = 86_400.0
WINDOW_S = _DAY_S
OPEN = ("validating", "in_progress", "cancelling")
"""States of a batch that a gateway works on."""

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    key TEXT NOT NULL, id TEXT NOT NULL PRIMARY KEY, name TEXT NOT NULL, purpose TEXT NOT NULL,
    created_s REAL NOT NULL, bytes INTEGER NOT NULL, content BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_by_key ON files (key, created_s);
CREATE TABLE IF NOT EXISTS batches (
    key TEXT NOT NULL, id TEXT NOT NULL PRIMARY KEY, input TEXT NOT NULL, endpoint TEXT NOT NULL,
    state TEXT NOT NULL, created_s REAL NOT NULL, began_s REAL, ended_s REAL,
    total INTEGER NOT NULL DEFAULT 0,
    output TEXT, errors TEXT, problems TEXT NOT NULL DEFAULT '', metadata TEXT NOT NULL,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
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


_SO_FAR = "{} + (SELECT count(*) FROM answers WHERE batch = id AND is_good = {})"
_BATCH = ", ".join((*StoredBatch._fields[:-2], _SO_FAR.format("completed", 1), _SO_FAR.format("failed", 0)))
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
        self._file = Database(path, _TABLES, of="batches")
        self.close = self._file.close

    # --- files

    async def add_file(self, key: str, name: str, purpose: str, content: bytes) -> File:
        """Store a file. Raises HttpError 413 if the key's files would be too large together."""

        def do(file: Connection) -> File:
            now_s = self._now_s()
            self._forget_old(file, now_s)
            held = file.execute("SELECT sum(bytes) FROM files WHERE key = ?", (key,)).fetchone()[0] or 0
            if held + len(content) > self._most_bytes:
                most_mb = self._most_bytes / 1e6
                text = f"your files would be larger than {most_mb:.0f} MB together: delete some first"
                raise HttpError(413, text, error_code="files_too_large")
            return _put_file(file, key, name, purpose, content, now_s)

        return await self._file.run(do)

    async def files(self, key: str, purpose: str | None) -> list[File]:
        """Return the key's files, the newest first."""
        asked = (
            f"SELECT {_FILE} FROM files WHERE key = ? AND (? IS NULL OR purpose = ?) ORDER BY created_s DESC"
        )
        return await self._file.run(
            lambda file: [File(*row) for row in file.execute(asked, (key, purpose, purpose))]
        )

    async def file(self, key: str, name: str) -> File:
        return (await self._read_file(key, name))[0]

    async def content(self, key: str, name: str) -> bytes:
        return (await self._read_file(key, name))[1]

    async def delete_file(self, key: str, name: str) -> None:
        asked = "DELETE FROM files WHERE key = ? AND id = ?"
        if not await self._file.run(lambda file: file.execute(asked, (key, name)).rowcount):
            raise _not_found("file", name)

    async def _read_file(self, key: str, name: str) -> tuple[File, bytes]:
        asked = f"SELECT {_FILE}, content FROM files WHERE key = ? AND id = ?"
        row = await self._file.run(lambda file: file.execute(asked, (key, name)).fetchone())
        if row is None:
            raise _not_found("file", name)
        return File(*row[:-1]), row[-1]

    def _forget_old(self, file: Connection, now_s: float) -> None:
        before_s = now_s - self._most_age_s
        file.execute("DELETE FROM files WHERE created_s < ?", (before_s,))
        file.execute("DELETE FROM batches WHERE ended_s < ?", (before_s,))

    # --- batches, as clients see them

    async def begin(self, key: str, input_file: str, endpoint: str, metadata: str) -> StoredBatch:
        """Store a new batch. Raises HttpError 404 without the file."""
        await self.file(key, input_file)
        name = f"batch_{token_hex(12)}"
        insert = (
            "INSERT INTO batches (key, id, input, endpoint, state, created_s, metadata)"
            " VALUES (?, ?, ?, ?, 'validating', ?, ?)"
        )
        row = (key, name, input_file, endpoint, self._now_s(), metadata)
        await self._file.run(lambda file: file.execute(insert, row))
        return await self.batch(key, name)

    async def batch(self, key: str, name: str) -> StoredBatch:
        asked = f"SELECT {_BATCH} FROM batches WHERE key = ? AND id = ?"
        row = await self._file.run(lambda file: file.execute(asked, (key, name)).fetchone())
        if row is None:
            raise _not_found("batch", name)
        return StoredBatch._make(row)

    async def batches(self, key: str, after: str | None, limit: int) -> list[StoredBatch]:
        """Return the key's batches, the newest first, those older than `after`."""
        asked = (
            f"SELECT {_BATCH} FROM batches WHERE key = ? AND (? IS NULL OR created_s < "
            "(SELECT created_s FROM batches WHERE id = ?)) ORDER BY created_s DESC LIMIT ?"
        )
        rows = await self._file.run(lambda file: file.execute(asked, (key, after, after, limit)).fetchall())
        return [StoredBatch._make(row) for row in rows]

    async def cancel(self, key: str, name: str) -> StoredBatch:
        """Ask for a batch's end; one that has ended is unchanged."""
        asked = (
            "UPDATE batches SET state = 'cancelling' WHERE key = ? AND id = ? AND state IN"
            " ('validating', 'in_progress')"
        )
        await self._file.run(lambda file: file.execute(asked, (key, name)))
        return await self.batch(key, name)

    # --- batches, as the gateway that runs one sees it

    async def take(self, owner: str) -> StoredBatch | None:
        """Lease the oldest batch that nobody works on, for `LEASE_S`; None: there is none."""
        asked = (
            f"SELECT {_BATCH} FROM batches WHERE state IN (?, ?, ?) AND leased_until_s < ?"
            " ORDER BY created_s LIMIT 1"
        )

        def do(file: Connection) -> StoredBatch | None:
            now_s = self._now_s()
            if file.execute(asked, (*OPEN, now_s)).fetchone() is None:
                return None  # without the lock that the next lines take
            file.execute("BEGIN IMMEDIATE")
            row = file.execute(asked, (*OPEN, now_s)).fetchone()
            if row is None:
                return None
            found = StoredBatch._make(row)
            lease = "UPDATE batches SET owner = ?, leased_until_s = ? WHERE id = ?"
            file.execute(lease, (owner, now_s + LEASE_S, found.id))
            return found

        return await self._file.run(do)

    async def renew(self, owner: str, name: str) -> str:
        """Renew the lease, and return the batch's state; empty: the lease is another's now."""
        renew = "UPDATE batches SET leased_until_s = ? WHERE id = ? AND owner = ?"

        def do(file: Connection) -> str:
            if not file.execute(renew, (self._now_s() + LEASE_S, name, owner)).rowcount:
                return ""
            return str(file.execute("SELECT state FROM batches WHERE id = ?", (name,)).fetchone()[0])

        return await self._file.run(do)

    async def start(self, name: str, total: int) -> None:
        """Note that validation found `total` good lines."""
        asked = (
            "UPDATE batches SET total = ?, began_s = coalesce(began_s, ?), state = 'in_progress'"
            " WHERE id = ? AND state = 'validating'"
        )
        await self._file.run(lambda file: file.execute(asked, (total, self._now_s(), name)))

    async def answered(self, name: str) -> set[int]:
        """Return the numbers of lines with an answer."""
        asked = "SELECT line FROM answers WHERE batch = ?"
        return await self._file.run(lambda file: {row[0] for row in file.execute(asked, (name,))})

    async def put_answer(self, name: str, line: int, content: bytes, *, is_good: bool) -> None:
        """Store an answer; the first one of a line stays, and none comes after the batch's end."""
        insert = (
            "INSERT OR IGNORE INTO answers SELECT id, ?, ?, ? FROM batches WHERE id = ? AND ended_s IS NULL"
        )
        await self._file.run(lambda file: file.execute(insert, (line, int(is_good), content, name)))

    async def end(self, owner: str, batch: StoredBatch, state: str, problems: str = "") -> None:
        """End a batch: its answers become files, in the order of its lines."""

        def do(file: Connection) -> None:
            now_s = self._now_s()
            file.execute("BEGIN IMMEDIATE")
            whose = file.execute("SELECT owner FROM batches WHERE id = ?", (batch.id,)).fetchone()
            if whose is None or whose[0] != owner:
                return
            names: list[str | None] = []
            counts: list[int] = []
            for is_good, kind in ((1, "output"), (0, "error")):
                asked = "SELECT content FROM answers WHERE batch = ? AND is_good = ? ORDER BY line"
                lines = [row[0] for row in file.execute(asked, (batch.id, is_good))]
                content, name = b"".join(line + b"\n" for line in lines), f"{batch.id}_{kind}.jsonl"
                made = _put_file(file, batch.key, name, "batch_output", content, now_s) if lines else None
                names.append(made.id if made else None)
                counts.append(len(lines))
            file.execute("DELETE FROM answers WHERE batch = ?", (batch.id,))
            file.execute(
                "UPDATE batches SET state = ?, ended_s = ?, output = ?, errors = ?,"
                " completed = ?, failed = ?, problems = ?, leased_until_s = 0 WHERE id = ?",
                (state, now_s, *names, *counts, problems, batch.id),
            )

        await self._file.run(do)


def _put_file(file: Connection, key: str, name: str, purpose: str, content: bytes, now_s: float) -> File:
    made = File(f"file-{token_hex(12)}", name, purpose, now_s, len(content))
    row = (key, made.id, name, purpose, now_s, len(content), content)
    file.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    return made


def _not_found(kind: str, name: str) -> HttpError:
    text = f"there is no {kind} {shown(name, 100)!r}: it never was, was deleted, or has grown too old"
    return HttpError(404, text, error_code=f"{kind}_not_found")
