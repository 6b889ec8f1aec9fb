"""The seed, under a real supervisor (the stand-ins'), because what it forks must become that one's child."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.stack.down import is_alive
from tests.services.stack.commands import pids_of, state_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")


def test_a_fork_is_the_supervisors_child(tmp_path: Path, foreground: "subprocess.Popen[str]") -> None:
    sprout = psutil.Process(pids_of(tmp_path)["sprout"])
    assert sprout.ppid() == foreground.pid and sprout.name() == "sprout"
    assert sprout.cmdline()[:5] == ["python", "-m", "tests.services.stack.sprout", "--leaf", "1"]
    assert os.getsid(sprout.pid) == sprout.pid and sprout.environ()["PATH"] == os.environ["PATH"]
    said = tmp_path / "logs" / "sprout.log"
    until(lambda: said.read_text() != "", "it said nothing")
    assert said.read_text() == "sprout ['--leaf', '1'] green True\n"


def test_it_is_restarted_and_survives_its_seed(tmp_path: Path, foreground: "subprocess.Popen[str]") -> None:
    before = pids_of(tmp_path)
    os.kill(before["sprout"], signal.SIGKILL)
    until(lambda: pids_of(tmp_path).get("sprout") not in (None, before["sprout"]), "not restarted")
    (row,) = [row for row in state_of(tmp_path)["children"] if row["name"] == "sprout"]
    assert row["last_exit"] == "killed by SIGKILL"
    again = row["pid"]
    assert psutil.Process(again).ppid() == foreground.pid
    said = tmp_path / "logs" / "sprout.log"  # Until it speaks it is the seed's fork, and may end with it.
    until(lambda: said.read_text().count("sprout [") == 2, "it said nothing")
    os.kill(before["seed"], signal.SIGKILL)
    until(lambda: pids_of(tmp_path).get("seed") not in (None, before["seed"]), "the seed is not restarted")
    assert is_alive(again) and pids_of(tmp_path)["sprout"] == again


def test_a_fork_dies_with_the_supervisor(tmp_path: Path, foreground: "subprocess.Popen[str]") -> None:
    pids = pids_of(tmp_path)
    foreground.kill()
    foreground.wait(timeout=10.0)
    until(lambda: not any(map(is_alive, (pids["sprout"], pids["seed"]))), "orphans")
