"""Detect processes that left the bus from nats-server's announcements, sooner than by their silence.

The server announces every connection's begin and end (`$SYS.ACCOUNT.….CONNECT`, `DISCONNECT`). The stack's
configuration maps both to `evt.bus.…`, in a cluster those of all servers. A bus names its main connection
after instance and incarnation, and numbers it: a server may tell the end of one long after the next began
elsewhere, and servers' clocks differ. The run is gone when its latest connection ends and none returns within
`GRACE_S`; live processes reconnect sooner. A server that dies announces nothing: its clients connect to
another one, or are missed by their heartbeats.
If the run has a known TCP port, a refused connection there proves its end at once, and one that is accepted
proves that it goes on, maybe at a server from which nothing is heard. Frozen processes and servers without
announcements are left to heartbeat timeouts. A wrong verdict costs a resubmission.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

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


def connection_name(instance: str, incarnation: int, number: int = 1) -> str:
    """Return the name of a bus's main connection, the run's `number`th; other connections of the process are
    named differently."""
    return f"{subjects.checked_id(instance)}/{incarnation}/{number}"


class BusClient(msgspec.Struct, frozen=True):
    """A connection, as described by nats-server."""

    user: str = ""
    name: str = ""

    @property
    def connection(self) -> tuple[Start, int] | None:
        """Run that owns the connection, and its number there; None if it is not a main connection."""
        instance, *numbers = self.name.split("/")
        is_main = instance == self.user != "" and len(numbers) == 2
        if not is_main or not all(each.isdecimal() and len(each) <= _MOST_DIGITS for each in numbers):
            return None
        return (instance, int(numbers[0])), int(numbers[1])


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
        self._latest: OrderedDict[Start, int] = OrderedDict()
        """Number of the latest connection of each known run."""
        self._leaving: dict[Start, asyncio.TimerHandle] = {}
        self._doors: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """Incarnation and TCP address by instance."""
        self._knocking: set[asyncio.Task[None]] = set()
        self._open: set[Start] = set()
        """Leaving runs whose port accepted the latest connection."""
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
        if event.client.connection is None:
            return
        start, number = event.client.connection
        self._latest[start] = max(number, self._latest.get(start, number))
        self._latest.move_to_end(start)
        if len(self._latest) > _MOST_KNOWN:
            self._latest.popitem(last=False)
        self._gone.pop(start, None)
        if (leaving := self._leaving.pop(start, None)) is not None:
            leaving.cancel()

    def on_disconnected(self, event: BusAdvisory) -> None:
        if event.client.connection is None:
            return
        start, number = event.client.connection
        is_former = number < self._latest.get(start, number)
        if is_former or start in self._leaving or len(self._leaving) >= _MOST_KNOWN:
            return
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
        """Dial until the port refuses a connection, which proves that the run has ended, or time is up."""
        while start in self._leaving:
            is_refused = await _refuses(host, port)
            leaving = self._leaving.get(start)
            (self._open.add if is_refused is False else self._open.discard)(start)
            if is_refused and leaving is not None:
                leaving.cancel()
                self._on_left(start)
            await asyncio.sleep(_KNOCK_AGAIN_S)
        self._open.discard(start)

    def _on_left(self, start: Start) -> None:
        del self._leaving[start]
        if start in self._open:
            return
        self._gone[start] = None
        if len(self._gone) > _MOST_KNOWN:
            self._gone.popitem(last=False)
        canonical(_log, "left the bus", instance=start[0], incarnation=start[1])
        for on_gone in self._watchers:
            on_gone(*start)


async def _refuses(host: str, port: int) -> bool | None:
    """Return True if the machine refuses connections to that port, False if it accepts one, None if it does
    not answer."""
    try:
        async with asyncio.timeout(GRACE_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return None
    writer.close()
    return False
