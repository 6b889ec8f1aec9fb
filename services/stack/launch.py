"""How a child comes to be: as a program of its own, or forked from the seed, which has done its imports."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.stack.process import ChildProcess, become_subreaper

_SEED_DEADLINE_S = 90.0
_SEED_POLL_S = 0.02
_ANSWER_DEADLINE_S = 10.0
_MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 108."""


class Launcher(Protocol):
    """A way to start one child."""

    async def launch(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path
    ) -> ChildProcess:
        """Raises OSError when that cannot be done."""
        ...


@dataclass(frozen=True)
class ProgramLauncher:
    """Starts `argv` as a program of its own."""

    async def launch(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path
    ) -> ChildProcess:
        return ChildProcess.start(argv, env, cwd, log_path)


@dataclass(frozen=True)
class SeedLauncher:
    """Has the seed, a process that has done the imports, fork a child that runs `python -m module …`.

    The seed listens at `socket`. Without one, `argv` is started as a program.
    """

    socket: Path
    name: str
    module: str
    arguments: tuple[str, ...]

    async def launch(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log_path: Path
    ) -> ChildProcess:
        try:
            if become_subreaper():
                request = {"name": self.name, "module": self.module, "argv": self.arguments}
                whole = json.dumps({**request, "env": dict(env), "log": str(log_path)})
                return ChildProcess.adopt(await self._ask(whole))
        except (OSError, TimeoutError, ValueError):
            pass
        return ChildProcess.start(argv, env, cwd, log_path)

    async def _ask(self, request: str) -> int:
        async with asyncio.timeout(_SEED_DEADLINE_S):
            reader, writer = await self._connect()
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE_S):
                writer.write(request.encode() + b"\n")
                await writer.drain()
                return int(await reader.readline())
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(str(self.socket))
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_SEED_POLL_S)


def socket_fits(path: Path) -> bool:
    """Whether the kernel takes so long a name for a socket."""
    return len(str(path).encode()) <= _MAX_SOCKET_PATH_BYTES
