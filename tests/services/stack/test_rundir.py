"""The run directory.

Ending what a killed supervisor left behind.
"""

import asyncio
import json
import os
import stat
import time
from pathlib import Path

import psutil

from services.stack.down import end_leftovers
from services.stack.down import is_alive as alive
from services.stack.process import ChildProcess
from services.stack.rundir import RunDirectory
from shared.subjects import OPERATOR
from tests.patience import PATIENCE_S
from tests.services.stack.standin import PARENT, PYTHON


def made(path: Path) -> RunDirectory:
    run = RunDirectory(path / "run")
    run.create()
    return run


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = made(tmp_path), made(tmp_path)
    assert second.holder() is None
    assert first.acquire()
    assert not second.acquire()
    assert second.holder() == os.getpid()
    first.release()
    assert second.holder() is None
    assert second.acquire()
    second.release()


def test_credentials_are_made_once_and_private(tmp_path: Path) -> None:
    run = made(tmp_path)
    first = run.credentials("worker-0", "worker-1")
    assert first == made(tmp_path).credentials()
    assert first.api_key.startswith("sk-")
    assert set(first.nats_passwords) == {OPERATOR, "worker-0", "worker-1"}
    assert len(set(first.nats_passwords.values())) == 3
    assert all(p[0].isalpha() and p.isalnum() and len(p) > 40 for p in first.nats_passwords.values())
    assert len(first.api_key_sha256) == 64
    assert first.api_key not in first.api_key_sha256
    for path in (run.path / "credentials.json", run.path):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_damaged_files_are_made_anew(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.path / "credentials.json").write_text('{"api_key": 1')
    made_anew = run.credentials()
    assert made_anew.api_key.startswith("sk-")
    (run.path / "credentials.json").write_text(
        json.dumps({"api_key": "sk-kept", "nats_passwords": {"worker-7": "kept", "worker": "gone"}})
    )
    completed = run.credentials("ledger-0")
    assert completed.api_key == "sk-kept"
    assert completed.nats_passwords["worker-7"] == "kept"
    assert set(completed.nats_passwords) == {OPERATOR, "worker-7", "ledger-0"}
    assert completed == run.credentials()
    run.state_file.write_text("[1]")
    assert run.read_state() == {}
    run.write_state({"pid": 7})
    assert run.read_state() == {"pid": 7}
    assert not list(run.path.glob("*.tmp"))


def test_logs_rotate_and_the_oldest_goes(tmp_path: Path) -> None:
    run = made(tmp_path)
    for number in range(6):
        (run.logs / "a.log").write_text(str(number))
        run.rotate_logs()
    assert {p.name: p.read_text() for p in run.logs.iterdir()} == {
        "a.log.1": "5",
        "a.log.2": "4",
        "a.log.3": "3",
    }


def test_long_logs_are_trimmed_under_their_writer(tmp_path: Path) -> None:
    run = made(tmp_path)
    with (run.logs / "a.log").open("a") as writer:
        writer.write("x" * 200)
        writer.flush()
        (run.logs / "b.log").write_text("short")
        assert run.trim_logs(limit_bytes=100) == ["a"]
        writer.write("more")
    assert (run.logs / "a.log").read_text() == "more"
    assert (run.logs / "a.log.1").read_text() == "x" * 200
    assert (run.logs / "b.log").read_text() == "short"


async def test_ends_groups_and_spares_who_has_the_pid_now(tmp_path: Path) -> None:
    left = ChildProcess.start((*PYTHON, PARENT), os.environ, tmp_path, tmp_path / "log")
    other = ChildProcess.start(("sleep", "1000"), os.environ, tmp_path, tmp_path / "log")
    now_s = time.time()
    async with asyncio.timeout(PATIENCE_S):
        while not psutil.Process(left.pid).children():
            await asyncio.sleep(0.01)
    state = {
        "children": [
            {"pid": left.pid, "started_unix_s": now_s},
            {"pid": other.pid, "started_unix_s": now_s - 1000.0},
            {"pid": None, "started_unix_s": now_s},
        ]
    }
    assert end_leftovers(state) == 2, "the child and its own child"
    assert alive(other.pid)
    assert not alive(left.pid)
    other.kill()
    await asyncio.gather(left.wait(), other.wait())
    assert end_leftovers(state) == 0
    assert end_leftovers({}) == 0
