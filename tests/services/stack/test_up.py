"""`up` in the foreground over stand-in children: real processes, real signals.

What placement wants against what runs.
"""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stack.down import is_alive as alive
from services.stack.rundir import RunDirectory
from services.stack.supervisor import ChildSpec, ChildState, Supervisor
from services.stack.up import WorkerScaling, differences
from shared.messages.moves import WorkersWanted
from tests.services.stack.commands import (
    DEADLINE_S,
    ROOT,
    STANDIN,
    command,
    family,
    is_ready,
    pids_of,
    start,
    state_of,
    until,
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_everything(
    tmp_path: Path, foreground: "subprocess.Popen[str]", number: signal.Signals
) -> None:
    pids = family(tmp_path)
    foreground.send_signal(number)
    assert foreground.wait(timeout=DEADLINE_S) == 0 and not any(map(alive, pids))
    said = (tmp_path / "out").read_text()
    assert "ready in" in said and "deaf did not end within 0.3 s; killing it" in said
    assert state_of(tmp_path)["phase"] == "stopped"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the kernel see to it")
def test_a_killed_supervisor_takes_all_children_along_and_can_be_started_again(
    tmp_path: Path, free_port: int, foreground: "subprocess.Popen[str]"
) -> None:
    pids, relatives = pids_of(tmp_path), family(tmp_path)
    foreground.kill()
    foreground.wait(timeout=DEADLINE_S)
    until(lambda: not any(map(alive, pids.values())), "orphans")
    again = start(tmp_path, free_port)
    assert not any(map(alive, relatives)), "the next start ends what children of children are left"
    assert command("down", "--run-dir", str(tmp_path)).returncode == 0 and again.wait(timeout=DEADLINE_S) == 0


def test_no_zombie_stays_with_the_supervisor(tmp_path: Path, foreground: "subprocess.Popen[str]") -> None:
    *_, grandchild = family(tmp_path)
    os.kill(pids_of(tmp_path)["parent"], signal.SIGKILL)
    until(lambda: not psutil.pid_exists(grandchild), "what a dead child left is still there")
    until(lambda: len(pids_of(tmp_path)) == 6, "not restarted")
    assert foreground.poll() is None


def test_a_terminal_gets_lines_to_paste_and_its_loss_ends_the_stack(tmp_path: Path, free_port: int) -> None:
    ports = [f"--port={free_port}", "--nats-port=0"]
    words = [*STANDIN, "up", f"--run-dir={tmp_path}", *ports, "--stop-grace=0.2"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(words[0], words)
    try:
        os.set_blocking(terminal, False)
        said = bytearray()
        until(lambda: _drained(terminal, said) and is_ready(tmp_path, pid), "not ready")
        pids = pids_of(tmp_path)
        _drained(terminal, said)
        key = RunDirectory(tmp_path).credentials().api_key
        (curl,) = [line for line in said.decode().splitlines() if line.startswith("curl -N ")]
        assert f"http://127.0.0.1:{free_port}/v1/chat/completions" in curl
        assert f"'Authorization: Bearer {key}'" in curl and '"model":"standin","stream":true' in curl
    finally:
        os.close(terminal)
    until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the supervisor outlived its terminal")
    assert not any(map(alive, pids.values()))


def _drained(terminal: int, into: bytearray) -> bool:
    try:
        while data := os.read(terminal, 65_536):
            into += data
    except BlockingIOError:
        pass
    return True


NAMES = [f"worker-{number}" for number in range(4)]


def wanted(count: int, *parked: str) -> WorkersWanted:
    return WorkersWanted(wanted=count, parked=parked)


@pytest.mark.parametrize(
    ("event", "running", "stopped", "expected"),
    [
        (wanted(4), NAMES, [], ([], [])),
        (wanted(2, "worker-2", "worker-3"), NAMES, [], (["worker-2", "worker-3"], [])),
        (wanted(2, "worker-3"), NAMES[:2], NAMES[2:], ([], [])),
        (wanted(3, "worker-2"), NAMES[:2], NAMES[2:], ([], ["worker-3"])),
        (wanted(3), NAMES[:2], NAMES[2:], ([], ["worker-2"])),
        (wanted(9), NAMES[:1], NAMES[1:], ([], NAMES[1:])),
        (wanted(0, *NAMES), NAMES, [], (NAMES[1:], [])),
        (wanted(1, "worker-0"), ["worker-0"], ["worker-1"], (["worker-0"], ["worker-1"])),
    ],
)
def test_differences(
    event: WorkersWanted, running: list[str], stopped: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert differences(event, running, stopped) == expected


class Fleet(Supervisor):
    """Its children start and stop at once."""

    def __init__(self) -> None:
        specs = [ChildSpec(name, (), {}) for name in NAMES]
        super().__init__(specs, cwd=Path(), logs=Path(), say=lambda _: None)

    @property
    def running(self) -> list[str]:
        return [name for name, child in self.children.items() if child.wanted.is_set()]

    def park(self, name: str) -> None:
        super().park(name)
        self.children[name].state = ChildState.PARKED


TURNS = {"a": NAMES[::2], "b": NAMES[1::2]}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sets(st.sampled_from(NAMES)))))
def test_what_one_model_wants_leaves_workers_of_another(events: list[tuple[str, int, set[str]]]) -> None:
    """Not even where its event names them."""
    fleet = Fleet()
    scaling = WorkerScaling(fleet, TURNS)
    for model, count, parked in events:
        before = list(fleet.running)
        scaling.on_wanted(WorkersWanted(wanted=count, parked=tuple(sorted(parked)), model=model))
        for other, names in TURNS.items():
            mine = [name for name in fleet.running if name in names]
            assert mine
            if other != model:
                assert mine == [name for name in before if name in names]
            else:
                needed = [name for name in mine if name not in parked]
                assert len(needed) >= min(count, len(set(names) - parked))


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from(NAMES))), max_size=20))
def test_somebody_always_runs_and_repeating_changes_nothing(events: list[tuple[int, set[str]]]) -> None:
    fleet = Fleet()
    scaling = WorkerScaling(fleet, {"": NAMES})
    for count, parked in events:
        scaling.on_wanted(wanted(count, *sorted(parked)))
        assert fleet.running
        needed = [name for name in fleet.running if name not in parked]
        assert len(needed) >= min(count, len(NAMES) - len(parked))
