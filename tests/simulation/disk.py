"""The files of disk tiers, in memory, and what goes wrong with them: full, corrupt, failing."""

import errno
import os as real
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation.threads import strand
from tests.simulation.world import Process, World

_PAGE_BYTES = 4096
_ZEROS = bytes(_PAGE_BYTES)


@dataclass
class _File:
    size: int = 0
    holder: Process | None = None
    """Who has locked it."""
    _pages: dict[int, bytearray] = field(default_factory=dict)
    """By number; those that were never written to are zeros."""

    def read(self, offset: int, size: int) -> bytes:
        """Fewer at the end."""
        end = min(offset + size, self.size)
        parts = [self._page(number)[first:last] for number, first, last in _spans(offset, end)]
        return b"".join(parts)

    def write(self, offset: int, data: bytes) -> None:
        at = 0
        for number, first, last in _spans(offset, offset + len(data)):
            page = self._pages.setdefault(number, bytearray(_PAGE_BYTES))
            page[first:last] = data[at : at + last - first]
            at += last - first
        self.size = max(self.size, offset + len(data))

    def cut(self, size: int) -> None:
        kept = self.read(0, size)
        self._pages.clear()
        self.size = 0
        self.write(0, kept)
        self.size = size

    def _page(self, number: int) -> bytes | bytearray:
        return self._pages.get(number, _ZEROS)


def _spans(offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Numbers of pages, and from where to where in each."""
    while offset < end:
        number, first = divmod(offset, _PAGE_BYTES)
        last = min(_PAGE_BYTES, first + end - offset)
        yield number, first, last
        offset += last - first


@dataclass
class Trouble:
    """Of one process's disk."""

    is_full: bool = False
    fails: float = 0.0
    """Of its calls, so many."""
    corrupts: float = 0.0
    """Of what it reads, a bit."""


class Disks:
    """All of a world: a file outlives its process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._files: dict[str, _File] = {}
        self._open: dict[int, tuple[_File, Process]] = {}
        self._descriptors = count(1000)
        self.trouble: dict[str, Trouble] = {}
        """By process."""
        self.os = SimpleNamespace(
            O_RDWR=real.O_RDWR,
            O_CREAT=real.O_CREAT,
            O_CLOEXEC=real.O_CLOEXEC,
            path=real.path,
            open=self._open_file,
            close=self._close,
            pread=self._pread,
            preadv=self._preadv,
            pwrite=self._pwrite,
            ftruncate=self._ftruncate,
            posix_fallocate=self._allocate,
        )
        self.fcntl = SimpleNamespace(LOCK_EX=1, LOCK_NB=4, flock=self._lock)

    def _open_file(self, path: Path, *_: Any) -> int:
        descriptor = next(self._descriptors)
        file = self._files.setdefault(str(path), _File())
        self._open[descriptor] = file, strand().process
        return descriptor

    def _lock(self, descriptor: int, _: int) -> None:
        file, me = self._open[descriptor]
        if file.holder is not None and file.holder.alive and file.holder is not me:
            raise BlockingIOError(errno.EAGAIN, "held")
        file.holder = me

    def _close(self, descriptor: int) -> None:
        file, me = self._open.pop(descriptor)
        if file.holder is me:
            file.holder = None

    def _pread(self, descriptor: int, size: int, offset: int) -> bytes:
        return self._at(descriptor).read(offset, size)

    def _preadv(self, descriptor: int, views: Sequence[Any], offset: int) -> int:
        view = memoryview(views[0]).cast("B")
        data = bytearray(self._at(descriptor).read(offset, len(view)))
        trouble = self.trouble.get(strand().process.name)
        if data and trouble is not None and self._world.random.random() < trouble.corrupts:
            data[self._world.random.randrange(len(data))] ^= 1 << self._world.random.randrange(8)
        view[: len(data)] = data
        return len(data)

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        file = self._at(descriptor)
        if self._is_full() and offset + len(data) > file.size:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(offset, bytes(data))
        return len(data)

    def _ftruncate(self, descriptor: int, size: int) -> None:
        self._at(descriptor).cut(size)

    def _allocate(self, descriptor: int, offset: int, size: int) -> None:
        if self._is_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        file = self._at(descriptor)
        file.size = max(file.size, offset + size)

    def _at(self, descriptor: int) -> _File:
        trouble = self.trouble.get(strand().process.name)
        if trouble is not None and self._world.random.random() < trouble.fails:
            raise OSError(errno.EIO, "Input/output error")
        return self._open[descriptor][0]

    def _is_full(self) -> bool:
        trouble = self.trouble.get(strand().process.name)
        return trouble is not None and trouble.is_full
