"""Fixtures of the stack's tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.stack import obstructions
from services.stack.down import end_leftovers
from tests.services.stack.commands import DEADLINE_S, start, state_of


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody listened on a moment ago."""
    return obstructions.free_port()


@pytest.fixture
def foreground(tmp_path: Path, free_port: int) -> Iterator["subprocess.Popen[str]"]:
    """`up` in the foreground, ready, in a session and on a terminal of its own."""
    process = start(tmp_path, free_port)
    yield process
    process.terminate()
    process.wait(timeout=DEADLINE_S)
    end_leftovers(state_of(tmp_path))
