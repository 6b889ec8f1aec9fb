"""Detect processes that left the bus from nats-server's announcements, sooner than by their silence.

The server announces every connection's begin and end (`$SYS.ACCOUNT.….CONNECT`, `DISCONNECT`). The stack's
configuration maps both to `evt.bus.…`, in a cluster those of all servers. A bus names its main connection
after instance and incarnation. The run is gone when its latest connection ends and none returns within
`GRACE_S`; live processes reconnect sooner. A server that dies announces nothing: its clients connect to
another one, or are missed by their heartbeats.
If the run has a known TCP port, a refused connection there proves its end at once. Frozen processes and
servers without announcements are left to heartbeat timeouts. A wrong verdict costs a resubmission.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from shared import subjects
from shared.bus.serving import Handler, Listener
from shared.liveness import Start
from shared.log import canonical, get_logger

GRACE_S = 0.15
_KNOCK_AGAIN_S = 0.03
"""The port may close a little later than the connection."""
_MOST_KNOWN = 4096
_MOST_DIGITS = 19
"""Digits of an incarnation, which is below 2^62."""
_log = get_logger("bus")

OnGone = Callable[[str, int], None]
"""Called with the instance and incarnation that left."""


def connection_name(instance: str, incarnation: int) -> str:
    """Return the name of a bus's main connection; other connections of the process are named differently."""
    return f"{subjects.checked_id(instance)}/{incarnation}"


class BusClient(msgspec.Struct, frozen=True, rename={"since": "start"}):
    """A connection, as described by nats-server."""

    user: str = ""
    name: str = ""
    since: datetime = datetime.min.replace(tzinfo=UTC)
    """Its begin, by the clock of its server."""

    @property
    def start(self) -> Start | None:
        """Run that owns the connection, or None if it is not a main connection."""
        instance, separator, incarnation = self.name.rpartition("/")
        if (
            not instance
            or not separator
            or instance != self.user
            or not incarnation.isdecimal()
            or len(incarnation) > _MOST_DIGITS
        ):
            return None
        return instance, int(incarnation)


class BusAdvisory(msgspec.Struct, frozen=True):
    """JSON announcement that a connection began or ended."""

    client: BusClient


class Departures:
    """Departures from the bus as seen by one process."""

    HANDLERS: tuple[Handler, ...] = (
        Listener(subjects.BUS_CONNECTED, BusAdvisory, "on_connected", is_json=True),
        Listener(subjects.BUS_DISCONNECTED, BusAdvisory, "on_disconnected", is_json=True),
    )

    def __init__(self) -> None:
        self._connected: OrderedDict[Start, datetime] = OrderedDict()
        """Begin of the latest connection of each known run."""
        self._leaving: dict[Start, asyncio.TimerHandle] = {}
        self._doors: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """Incarnation and TCP address by instance."""
        self._knocking: set[asyncio.Task[None]] = set()
        self._gone: OrderedDict[Start, None] = OrderedDict()
        self._watchers: list[OnGone] = []

    def watch(self, on_gone: OnGone) -> None:
        """Add a callback that is called once for each run that leaves."""
        self._watchers.append(on_gone)

    def on_listening(self, instance: str, incarnation: int, address: str) -> None:
        """Record that a run accepts TCP connections at `address`, a host:port; "": nowhere."""
        self._doors[instance] = incarnation, address
        self._doors.move_to_end(instance)
        if len(self._doors) > _MOST_KNOWN:
            self._doors.popitem(last=False)

    def is_gone(self, instance: str, incarnation: int) -> bool:
        """Return True if the run left recently."""
        return (instance, incarnation) in self._gone

    def on_connected(self, event: BusAdvisory) -> None:
        start = event.client.start
        if start is None:
            return
        self._connected[start] = max(event.client.since, self._connected.get(start, event.client.since))
        self._connected.move_to_end(start)
        if len(self._connected) > _MOST_KNOWN:
            self._connected.popitem(last=False)
        self._gone.pop(start, None)
        if (leaving := self._leaving.pop(start, None)) is not None:
            leaving.cancel()

    def on_disconnected(self, event: BusAdvisory) -> None:
        start = event.client.start
        if start is None or event.client.since < self._connected.get(start, event.client.since):
            return
        if start in self._leaving or len(self._leaving) >= _MOST_KNOWN:
            return
        self._connected.pop(start, None)
        self._leaving[start] = asyncio.get_running_loop().call_later(GRACE_S, self._on_left, start)
        instance, incarnation = start
        listening, address = self._doors.get(instance, (0, ""))
        host, _, port = address.rpartition(":")
        if listening == incarnation and port.isdecimal() and int(port) < 1 << 16:
            knocking = asyncio.create_task(self._knock(start, host, int(port)))
            self._knocking.add(knocking)
            knocking.add_done_callback(self._knocking.discard)

    def forget(self) -> None:
        """Forget who left: they may have gone on at a server from which nothing was heard."""
        self._gone.clear()

    def close(self) -> None:
        """Cancel all pending checks; no callback follows."""
        for knocking in self._knocking:
            knocking.cancel()
        for leaving in self._leaving.values():
            leaving.cancel()
        self._leaving.clear()

    async def _knock(self, start: Start, host: str, port: int) -> None:
        """Dial until the port refuses a connection, which proves that the run has ended."""
        while start in self._leaving:
            if not await _refuses(host, port):
                await asyncio.sleep(_KNOCK_AGAIN_S)
            elif (leaving := self._leaving.get(start)) is not None:
                leaving.cancel()
                self._on_left(start)

    def _on_left(self, start: Start) -> None:
        del self._leaving[start]
        self._gone[start] = None
        if len(self._gone) > _MOST_KNOWN:
            self._gone.popitem(last=False)
        canonical(_log, "left the bus", instance=start[0], incarnation=start[1])
        for on_gone in self._watchers:
            on_gone(*start)


async def _refuses(host: str, port: int) -> bool:
    """Return True if the machine refuses connections to that port."""
    try:
        async with asyncio.timeout(GRACE_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
