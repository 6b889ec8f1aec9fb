"""Who has left the bus, as nats-server tells: a process that dies is known within a moment, not by silence.

The server announces each connection that begins or ends (`$SYS.ACCOUNT.….CONNECT`, `DISCONNECT`); the stack's
configuration hands both to its account as `evt.bus.…`. The main connection of a bus is named after instance
and incarnation, so the end of the last one of that name is the end of this start, unless it is back
within `GRACE_S`: a live process reconnects sooner. Of a start that is known to listen somewhere nobody waits
so long: where its port refuses a connection, it has ended. What this does not see is a process that is
frozen, or a server that does not tell: then silence counts. Being wrong costs a resubmission.
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
"""A port may be closed a little later than the connection."""
_MOST_KNOWN = 4096
_MOST_SERVERS = 64
_MOST_DIGITS = 19
"""Of an incarnation: it is below 2^62."""
_log = get_logger("bus")

OnGone = Callable[[str, int], None]
"""Gets the instance and the incarnation of a start that is gone."""


def connection_name(instance: str, incarnation: int) -> str:
    """Of a bus's main connection; others of the process have other names."""
    return f"{subjects.checked_id(instance)}/{incarnation}"


class BusClient(msgspec.Struct, frozen=True):
    """A connection, as nats-server describes it."""

    id: int = 0
    user: str = ""
    name: str = ""

    @property
    def start(self) -> Start | None:
        """Whose it is; None: no main connection of anybody. Its user is what nats-server has checked."""
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


class BusServer(msgspec.Struct, frozen=True):
    """Who announces. A server that was started again has its name, and another id."""

    name: str = ""
    id: str = ""


class BusAdvisory(msgspec.Struct, frozen=True):
    """That a connection began, or ended. JSON."""

    client: BusClient
    server: BusServer = BusServer()


class Departures:
    """One process's view."""

    HANDLERS: tuple[Handler, ...] = (
        Listener(subjects.BUS_CONNECTED, BusAdvisory, "on_connected", is_json=True),
        Listener(subjects.BUS_DISCONNECTED, BusAdvisory, "on_disconnected", is_json=True),
    )

    def __init__(self) -> None:
        self._connections: OrderedDict[Start, set[int]] = OrderedDict()
        """Of starts that are there, as far as was heard."""
        self._servers: OrderedDict[str, str] = OrderedDict()
        """The id under which each was last heard of."""
        self._leaving: dict[Start, asyncio.TimerHandle] = {}
        self._doors: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """By instance: the incarnation that listens, and where."""
        self._knocking: set[asyncio.Task[None]] = set()
        self._gone: OrderedDict[Start, None] = OrderedDict()
        self._watchers: list[OnGone] = []

    def watch(self, on_gone: OnGone) -> None:
        """Called once for each start that has gone."""
        self._watchers.append(on_gone)

    def on_listening(self, instance: str, incarnation: int, address: str) -> None:
        """That start says that it accepts TCP connections at `address`, a host:port; "": nowhere."""
        self._doors[instance] = incarnation, address
        self._doors.move_to_end(instance)
        if len(self._doors) > _MOST_KNOWN:
            self._doors.popitem(last=False)

    def is_gone(self, instance: str, incarnation: int) -> bool:
        """Whether that start has left, and lately."""
        return (instance, incarnation) in self._gone

    def on_connected(self, event: BusAdvisory) -> None:
        self._meet(event.server)
        start = event.client.start
        if start is None:
            return
        self._connections.setdefault(start, set()).add(event.client.id)
        self._connections.move_to_end(start)
        if len(self._connections) > _MOST_KNOWN:
            self._connections.popitem(last=False)
        self._gone.pop(start, None)
        if (leaving := self._leaving.pop(start, None)) is not None:
            leaving.cancel()

    def on_disconnected(self, event: BusAdvisory) -> None:
        self._meet(event.server)
        start = event.client.start
        if start is None:
            return
        others = self._connections.get(start, set())
        others.discard(event.client.id)
        if others or start in self._leaving or len(self._leaving) >= _MOST_KNOWN:
            return
        self._connections.pop(start, None)
        self._leaving[start] = asyncio.get_running_loop().call_later(GRACE_S, self._on_left, start)
        instance, incarnation = start
        listening, address = self._doors.get(instance, (0, ""))
        host, _, port = address.rpartition(":")
        if listening == incarnation and port.isdecimal() and int(port) < 1 << 16:
            knocking = asyncio.create_task(self._knock(start, host, int(port)))
            self._knocking.add(knocking)
            knocking.add_done_callback(self._knocking.discard)

    def _meet(self, server: BusServer) -> None:
        """One that was started again has told nobody which connections ended with it: none of those count."""
        before = self._servers.setdefault(server.name, server.id)
        self._servers[server.name] = server.id
        if len(self._servers) > _MOST_SERVERS:
            self._servers.popitem(last=False)
        if before != server.id:
            self._connections.clear()

    def close(self) -> None:
        """Nobody is called any more."""
        for knocking in self._knocking:
            knocking.cancel()
        for leaving in self._leaving.values():
            leaving.cancel()
        self._leaving.clear()

    async def _knock(self, start: Start, host: str, port: int) -> None:
        """Until it is refused: then the start has ended. Anything else says nothing."""
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
    """Whether nobody listens there, as the system of that machine says."""
    try:
        async with asyncio.timeout(GRACE_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
