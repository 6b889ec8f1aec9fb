"""A SQLite file that gateways of one machine share; one thread does all reads and writes, in order."""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from shared.errors import ConfigError

_BUSY_S = 5.0
"""Seconds to wait for another gateway's lock on the file."""
_FIRST = "PRAGMA journal_mode = wal; PRAGMA secure_delete = on;"
T = TypeVar("T")


class Database:
    """The file. What is given to it runs as one transaction each, undone if it raises."""

    def __init__(self, path: Path, tables: str, *, of: str) -> None:
        """`tables` is SQL that creates what is missing, `of` names the setting. Raises ConfigError for an
        unusable file."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=of)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._file = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
            self._file.executescript(_FIRST + tables)
        except (OSError, sqlite3.Error) as error:
            text = f"{path} cannot be used: {error}; name another file, or start without gateway.{of}"
            raise ConfigError(text, param=of) from error

    def submit(self, do: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Run `do` in the thread; the future is done when it is committed."""
        return self._thread.submit(self._do, do)

    async def run(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """Run `do` in the thread, and return its result once it is committed."""
        return await asyncio.wrap_future(self.submit(do))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._file.close()

    def _do(self, do: Callable[[sqlite3.Connection], T]) -> T:
        with self._file:
            return do(self._file)


async def committed(writing: Future[None]) -> None:
    """Wait for what was submitted, so that whoever is told of it finds it; its error is not raised."""
    await asyncio.wait({asyncio.wrap_future(writing)})
