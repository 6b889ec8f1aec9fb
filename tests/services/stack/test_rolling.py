"""`roll` over stand-in children: the order, every process anew, and what cannot be rolled said at once."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from services.stack.rolling import rolled_names
from shared.errors import ConfigError
from tests.services.stack.commands import DEADLINE_S, ROOT, command, pids_of, state_of

CHILDREN = ["nats", "seed", "gateway-0", "gateway-1", "scheduler-0", "worker-0", "worker-1", "ledger-0"]


def test_workers_go_before_gateways_the_seed_first_and_the_bus_not_at_all() -> None:
    rest = ["ledger-0", "scheduler-0", "worker-0", "worker-1", "gateway-0", "gateway-1"]
    assert rolled_names(CHILDREN) == ["seed", *rest]
    assert rolled_names(CHILDREN, ["worker", "ledger-0"]) == ["seed", "ledger-0", "worker-0", "worker-1"]
    assert rolled_names(CHILDREN, ["nats"]) == ["nats"]
    assert rolled_names([name for name in CHILDREN if name != "seed"], ["worker-1"]) == ["worker-1"]
    with pytest.raises(ConfigError, match="nothing here is called 'worker-7'"):
        rolled_names(CHILDREN, ["worker-7"])


def test_every_process_is_started_anew(tmp_path: Path, foreground: "subprocess.Popen[str]") -> None:
    before = pids_of(tmp_path)
    done = command("roll", "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    after = pids_of(tmp_path)
    assert before.keys() == after.keys() and all(before[name] != after[name] for name in before)
    assert foreground.poll() is None
    told = state_of(tmp_path)
    assert told["roll"]["phase"] == "done" and told["phase"] == "ready"
    assert {(row["renewals"], row["restarts"]) for row in told["children"]} == {(1, 0)}


def test_what_cannot_be_rolled_is_untouched(tmp_path: Path, foreground: "subprocess.Popen[str]") -> None:
    before = pids_of(tmp_path)
    for words, why in ((["nobody"], "nothing here is called"), (["--code", "/tmp"], "has no code of Kvasir")):
        done = command("roll", "--run-dir", str(tmp_path), *words)
        assert done.returncode == 2 and why in done.stderr
    assert pids_of(tmp_path) == before
    done = command("roll", "--run-dir", str(tmp_path / "empty"))
    assert done.returncode == 1 and "nothing runs" in done.stdout


def test_code_that_does_not_start_is_left_again(tmp_path: Path, foreground: "subprocess.Popen[str]") -> None:
    broken = tmp_path / "broken"
    shutil.copytree(ROOT / "services" / "stack", broken / "services" / "stack")
    (broken / "services" / "__main__.py").write_text("")
    (broken / "services" / "stack" / "seed.py").write_text("raise SystemExit(1)")
    done = command("roll", "--run-dir", str(tmp_path), "seed", "--code", str(broken))
    assert done.returncode == 1 and "seed did not become ready from" in done.stdout
    row = next(row for row in state_of(tmp_path)["children"] if row["name"] == "seed")
    assert row["state"] == "ready"
    foreground.send_signal(signal.SIGTERM)
    assert foreground.wait(timeout=DEADLINE_S) == 0
