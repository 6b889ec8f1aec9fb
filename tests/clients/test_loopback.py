"""The guard itself: what would leave this machine is refused and noted."""

import socket

import pytest

from tests.clients import loopback


def test_leaving_is_refused_and_noted() -> None:
    with pytest.raises(PermissionError):
        socket.create_connection(("192.0.2.1", 443), timeout=1)
    with pytest.raises(PermissionError):
        socket.getaddrinfo("example.org", 443)
    assert len(loopback.refused) == 2
    loopback.refused.clear()
