"""`up --detach`, `status` and `down` over stand-in children."""

import os
import signal
from pathlib import Path

from services.stack.leftovers import is_alive as alive
from services.stack.rundir import RunDirectory
from tests.services.stack.commands import command, pids_of, state_of, until


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
        other = command(
            "up", "--run-dir", str(tmp_path / "other"), "--port", str(free_port), "--nats-port", "0"
        )
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
    assert failed.returncode == 1
    assert "error: the stack did not start: extra ended" in failed.stderr
    assert "my reason" in failed.stdout
    assert RunDirectory(tmp_path).holder() is None
    assert not any(map(alive, pids_of(tmp_path).values()))
