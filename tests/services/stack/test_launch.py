"""Without a seed to ask, a child is started the plain way.

`up --detach`, `status` and `down` over stand-in children.
"""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from services.stack import process
from services.stack.down import is_alive as alive
from services.stack.process import SeedLauncher
from services.stack.rundir import RunDirectory
from tests.patience import PATIENCE_S
from tests.services.stack.commands import command, pids_of, state_of, until
from tests.services.stack.standin import PYTHON

HELLO = (*PYTHON, "print('hello')")


@pytest.mark.parametrize("answer", [b"", b"nonsense\n", b"1\n"])
async def test_a_useless_seed_is_done_without(
    tmp_path: Path, answer: bytes, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "become_subreaper", lambda: True)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "seed.sock"):
        seedling = SeedLauncher(tmp_path / "seed.sock", "x", "json", ())
        child = await seedling(HELLO, os.environ, tmp_path, tmp_path / "log")
        assert await child.wait() == 0
    assert (tmp_path / "log").read_text() == "hello\n"


async def test_no_seed_is_waited_for_and_done_without(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(process, "become_subreaper", lambda: True)
    monkeypatch.setattr(process, "_SEED_DEADLINE_S", 0.1)
    seedling = SeedLauncher(tmp_path / "none.sock", "x", "json", ())
    child = await seedling(HELLO, os.environ, tmp_path, tmp_path / "log")
    assert await child.wait() == 0


async def test_a_seed_that_has_died_is_not_waited_for(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(process, "become_subreaper", lambda: True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    seedling = SeedLauncher(tmp_path / "dead.sock", "x", "json", ())
    async with asyncio.timeout(PATIENCE_S):
        child = await seedling(HELLO, os.environ, tmp_path, tmp_path / "log")
        assert await child.wait() == 0
    assert PATIENCE_S < process._SEED_DEADLINE_S


def test_detached_life(tmp_path: Path, free_port: int) -> None:
    where = ("--run-dir", str(tmp_path))
    up = ("up", "--detach", *where, f"--port={free_port}", "--nats-port=0", "--stop-grace=0.3")
    started = command(*up)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        key = RunDirectory(tmp_path).credentials().api_key
        assert "curl -N" in started.stdout and f"Bearer {key}" in started.stdout
        log = (tmp_path / "supervisor.log").read_text()
        assert "ready in" in log and key not in log, "the key is for who asked, not for a log"
        pids, supervisor = pids_of(tmp_path), state_of(tmp_path)["pid"]
        assert all(map(alive, pids.values()))
        second = command(*up)
        assert second.returncode == 3
        assert f"a stack runs already from {tmp_path}: pid {supervisor}" in second.stderr
        needed = command(*up, "--if-needed")
        assert needed.returncode == 0 and "runs already" in needed.stdout and "curl -N" in needed.stdout
        assert state_of(tmp_path)["pid"] == supervisor
        other = command("up", "--run-dir", f"{tmp_path}/other", "--port", str(free_port), "--nats-port", "0")
        assert other.returncode == 3
        assert f"port {free_port}, wanted for HTTP, is taken by pid {supervisor}" in other.stderr
        os.kill(pids["sleeper"], signal.SIGKILL)
        until(lambda: pids_of(tmp_path).get("sleeper") not in (None, pids["sleeper"]), "not restarted")
    finally:
        ended = command("down", "--run-dir", str(tmp_path))
    assert ended.returncode == 0
    assert f"stopped the stack of {tmp_path} (pid {supervisor}): 6 processes" in ended.stdout
    assert not any(map(alive, [supervisor, *pids.values()]))
    again = command("down", "--run-dir", str(tmp_path))
    assert (again.returncode, again.stdout) == (0, f"nothing runs from {tmp_path}\n")


def test_a_detached_start_that_fails_says_why(tmp_path: Path, free_port: int) -> None:
    failed = command(
        *(
            "up",
            "--detach",
            "--run-dir",
            str(tmp_path),
            "--port",
            str(free_port),
            "--nats-port=0",
            "--stop-grace=0.2",
        ),
        extra="print('my reason'); raise SystemExit(1)",
    )
    assert failed.returncode == 1 and "error: the stack did not start: extra ended" in failed.stderr
    assert "my reason" in failed.stdout and RunDirectory(tmp_path).holder() is None
    assert not any(map(alive, pids_of(tmp_path).values()))
