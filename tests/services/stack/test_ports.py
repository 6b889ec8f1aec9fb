"""Ports and who has them."""

import os
import socket

from services.stack import obstructions


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


def test_free_ports_are_free() -> None:
    assert obstructions.is_free(obstructions.free_port())
