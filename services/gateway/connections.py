"""Who may hold a connection when there are not enough for everybody. Pure: no sockets, no clock.

A connection is *engaged* while a request whose key was accepted is answered on it. Everything else is idle:
nothing sent yet, half a head, kept for a next request, answered before its request was complete. Idle
connections need no key, so they give way, the longest idle one first: whoever fills the server with them
displaces himself.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from services.gateway.errors import HttpError

C = TypeVar("C", bound=Hashable)

IPV6_PREFIX_BITS = 64
"""What one subscriber is given: its addresses count as one."""


class ConnectionTable(Generic[C]):
    """The open connections of one listener, at most `limit`, and `limit_per_address` from one address."""

    def __init__(self, limit: int, limit_per_address: int) -> None:
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._address_of: dict[C, str] = {}
        self._counts: dict[str, int] = {}
        self._idle: OrderedDict[C, None] = OrderedDict()
        """Longest idle first."""
        self._idle_at: dict[str, OrderedDict[C, None]] = {}
        """The same, by address."""

    def __len__(self) -> int:
        return len(self._address_of)

    def arrive(self, connection: C, address: str) -> C | None:
        """Takes a new connection in, idle; what it returns has left the table for it and is to be closed.

        Raises HttpError (429 for the address, 503 for the server) where every other one is engaged.
        """
        displaced = None
        if self._counts.get(address, 0) >= self._limit_per_address:
            displaced = next(iter(self._idle_at.get(address, ())), None)
            if displaced is None:
                raise HttpError(
                    429,
                    f"{self._limit_per_address} requests are being answered on as many connections from this "
                    "address: wait for some of them to end",
                    error_code="too_many_connections",
                )
        elif len(self) >= self._limit:
            displaced = next(iter(self._idle), None)
            if displaced is None:
                text = "a request is being answered on every connection the server takes: try again later"
                raise HttpError(503, text, error_code="overloaded")
        if displaced is not None:
            self.leave(displaced)
        self._address_of[connection] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        self.disengage(connection)
        return displaced

    def engage(self, connection: C) -> None:
        """From now on it does not give way. Harmless for one that has left."""
        self._idle.pop(connection, None)
        address = self._address_of.get(connection)
        if address in self._idle_at:
            self._idle_at[address].pop(connection, None)
            if not self._idle_at[address]:
                del self._idle_at[address]

    def disengage(self, connection: C) -> None:
        """It is idle from now on. Harmless for one that has left."""
        if connection in self._address_of:
            self.engage(connection)
            self._idle[connection] = None
            self._idle_at.setdefault(self._address_of[connection], OrderedDict())[connection] = None

    def leave(self, connection: C) -> None:
        """It is closed. Harmless for one that has left."""
        self.engage(connection)
        address = self._address_of.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]


def address_key(host: str | None) -> str:
    """What counts as one address: an IPv4 address, or the network of an IPv6 one."""
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return host or ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), IPV6_PREFIX_BITS), strict=False))
