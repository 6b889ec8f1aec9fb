"""Without a seed to ask, a child is started the plain way."""

import asyncio
import os
from pathlib import Path

import pytest

from services.stack import launch
from services.stack.launch import ProgramLauncher, SeedLauncher, socket_fits
from tests.services.stack.standin import PYTHON

HELLO = (*PYTHON, "print('hello')")


async def test_a_program_runs_its_argv(tmp_path: Path) -> None:
    child = await ProgramLauncher().launch(HELLO, os.environ, tmp_path, tmp_path / "log")
    assert await child.wait() == 0
    assert (tmp_path / "log").read_text() == "hello\n"


@pytest.mark.parametrize("answer", [b"", b"nonsense\n", b"1\n"])
async def test_a_seed_that_does_not_help_is_done_without(
    tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "become_subreaper", lambda: True)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "seed.sock"):
        seedling = SeedLauncher(tmp_path / "seed.sock", "x", "json", ())
        child = await seedling.launch(HELLO, os.environ, tmp_path, tmp_path / "log")
        assert await child.wait() == 0
    assert (tmp_path / "log").read_text() == "hello\n"


async def test_no_seed_at_all_is_waited_for_and_then_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "become_subreaper", lambda: True)
    monkeypatch.setattr(launch, "_SEED_DEADLINE_S", 0.1)
    seedling = SeedLauncher(tmp_path / "none.sock", "x", "json", ())
    child = await seedling.launch(HELLO, os.environ, tmp_path, tmp_path / "log")
    assert await child.wait() == 0


def test_long_names_do_not_fit_a_socket(tmp_path: Path) -> None:
    assert socket_fits(Path("/tmp/seed.sock"))
    assert not socket_fits(Path("/tmp") / ("x" * 120) / "seed.sock")
