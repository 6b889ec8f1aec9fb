"""What is said when something is in the way.

Ports and who has them.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.stack import obstructions
from services.stack.obstructions import Obstructed, choose_nats_port, choose_port, running_already
from services.stack.rundir import RunDirectory


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_taken_ports_are_refused_with_the_way_out(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstructions, "_PATIENCE_S", 0.1)
    with pytest.raises(
        Obstructed, match=rf"port {taken_port}.*pid {os.getpid()}[\s\S]*kill {os.getpid()}.*--port N"
    ):
        choose_port(taken_port)
    with pytest.raises(Obstructed, match="--nats-port N"):
        choose_nats_port(taken_port, print)


def test_nats_moves_aside_unless_told_where_to_be(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(obstructions, "DEFAULT_NATS_PORT", taken_port)
    chosen = choose_nats_port(None, said.append)
    assert chosen not in (0, taken_port)
    assert f"NATS goes to {chosen}" in said[0]


def test_a_second_start_is_told_how_to_stop_the_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    assert run.acquire()
    run.write_state({"pid": os.getpid(), "url": "http://127.0.0.1:1"})
    message = running_already(RunDirectory(tmp_path)).message
    run.release()
    assert f"pid {os.getpid()} on http://127.0.0.1:1" in message
    assert f"kvasir down --run-dir {tmp_path}" in message


def test_a_taken_port_is_not_free_and_its_owner_is_named() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert not obstructions.is_free(port)
        owner = obstructions.owner(port)
        assert owner.pid == os.getpid()
        assert f"pid {os.getpid()} (" in str(owner)
    assert obstructions.is_free(port)
    assert obstructions.owner(port).pid is None


def test_a_port_that_was_asked_for_and_is_not_listened_on_yet_is_given_to_nobody_else() -> None:
    """A gateway answered its clients as its operator: both listeners had been bound to one port."""
    asked = obstructions.free_port()
    every = {asked - 1 + step for step in range(3)}
    for _ in range(300):
        assert obstructions.choose_port(0, taken=every) not in every
