"""Addresses of TCP listeners."""

import pytest

from services.worker.peers.transport.tcp import split_address
from shared.errors import InvalidRequest


def test_hosts_and_ports() -> None:
    assert split_address("10.0.0.3:7100") == ("10.0.0.3", 7100)
    assert split_address("[::1]:7100") == ("::1", 7100)


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:99999", "@name"])
def test_what_is_none(address: str) -> None:
    with pytest.raises(InvalidRequest):
        split_address(address)
