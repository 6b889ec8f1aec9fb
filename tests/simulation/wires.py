"""Connections between processes and nats-servers, and routes between servers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.world import A_MOMENT_S, Process

if TYPE_CHECKING:
    from tests.simulation.bus import Bus, Server

_DETECT_S, _DETECT_IN_CLUSTER_S = (2.0, 2.0), (0.8, 1.2)
_ROUTE_DETECT_S, _ROUTE_AGAIN_S = (0.6, 0.75), (0.05, 1.0)


class Wire(ABC):
    """A connection whose messages arrive in order, or not at all."""

    detect_s = _ROUTE_DETECT_S
    """It breaks if nothing gets through for longer."""

    def __init__(self, bus: "Bus") -> None:
        self.bus, self.world = bus, bus.world
        self.is_open = False
        self._life = 0
        self._last_s: dict[object, float] = {}
        self._cut_until_s: dict[object, float] = {}
        """By receiver."""

    def carry(self, receiver: object, what: Callable[[], object], is_kept: bool = False) -> None:
        """`is_kept`: a server that hung reads it even when the sender has left."""
        life = self._life
        due_s = self._last_s[receiver] = max(
            self._last_s.get(receiver, 0.0) + A_MOMENT_S, self._due_s(receiver)
        )
        self.world.at(due_s, lambda: (self._life == life or (is_kept and self._reads(life))) and what())

    def _due_s(self, receiver: object) -> float:
        return max(self.world.now_s, self._cut_until_s.get(receiver, 0.0)) + self.bus.delay_s()

    def _reads(self, life: int) -> bool:
        return False

    @property
    def is_cut(self) -> bool:
        return self.cut_for_s > 0.0

    @property
    def cut_for_s(self) -> float:
        """How much longer."""
        return max(0.0, max(self._cut_until_s.values(), default=0.0) - self.world.now_s)

    def cut(self, for_s: float, *receivers: object) -> None:
        """Nothing reaches these for so long."""
        for each in receivers:
            self._cut_until_s[each] = max(self._cut_until_s.get(each, 0.0), self.world.now_s + for_s)
        detect_s, life = self.world.random.uniform(*self.detect_s), self._life
        if for_s > detect_s:
            self.world.after(detect_s, lambda: self.break_off() if self._life == life else None)

    @abstractmethod
    def break_off(self) -> None:
        """Lose all messages that are under way."""


class Connection(Wire):
    """Of a process with a server, for one after another."""

    server: "Server"
    """The one it goes to, or went to last."""

    def __init__(self, bus: "Bus", process: Process, name: str, user: str) -> None:
        super().__init__(bus)
        self.process, self.name, self.user = process, name, user
        self.id = 0
        self.breaks = 0
        """So often it broke off."""
        self._left_hanging = -1
        """The life that ended because its server hung."""
        self.detect_s = _DETECT_IN_CLUSTER_S if len(bus.servers) > 1 else _DETECT_S
        process.on_death.append(self._on_death)
        self.take: Callable[..., None] = lambda *_: None
        """At the client: a message of a subscription."""
        self.on_reach: Callable[[int], None] = lambda servers: None
        """At the client: its server reaches so many, itself included."""
        self.on_broken: Callable[[float], None] = lambda away_s: None
        """Given the time for which it cannot come back."""
        bus.all.append(self)

    def up(self, action: Callable[[], object], is_kept: bool = False) -> None:
        """At the server."""
        self.carry("server", action, is_kept)

    def down(self, action: Callable[[], object], in_order: bool = True) -> None:
        """At the client."""
        life = self._life

        def arrive() -> None:
            if self._life == life and self.process.alive:
                self.process.loop.call_from_outside(lambda: self._life == life and action())

        if in_order:
            self.carry("client", arrive)
        else:
            self.world.at(self._due_s("client"), arrive)

    def reach_s(self, server: "Server") -> float:
        """Seconds until that server answers who dials it now."""
        until_s = max(server.hangs_until_s, self.bus.apart_until_s(self.process.name, server.name))
        return max(0.0, until_s - self.world.now_s) + self.bus.delay_s()

    def open(self, server: "Server") -> None:
        self.server, self.is_open = server, True
        self._life += 1
        self._last_s.clear()
        self._cut_until_s.clear()
        self.tell_reach()
        server.enter(self)

    def tell_reach(self) -> None:
        reached = len(self.server.told)
        self.down(lambda: self.on_reach(reached))

    def close(self, *, is_noticed: bool = True) -> None:
        if self.is_open:
            self.is_open = False
            self._life += 1
            (self.server.leave if is_noticed else self.server.lose)(self)

    def cut(self, for_s: float, *receivers: object) -> None:
        """Both ways."""
        if self.is_open:
            super().cut(for_s, "server", "client")

    def break_off(self, away_s: float = 0.0) -> None:
        if self.is_open:
            self.breaks += 1
            if self.server.is_up and not self.server.works:
                self._left_hanging = self._life
            self.close(is_noticed=not (self.is_cut and self.server.works))
            self.process.loop.call_from_outside(self.on_broken, away_s)

    def _reads(self, life: int) -> bool:
        return life == self._left_hanging

    def _on_death(self) -> None:
        """The system closes it; the server sees that at once."""
        if self.is_open:
            self.is_open = False

            def gone() -> None:
                self._life += 1
                self.server.leave(self)

            self.carry("server", gone)


class DeadEnd:
    """A server's end of a connection that broke off unnoticed: what goes there is lost."""

    def __init__(self, of: Connection) -> None:
        self.id, self.name, self.user = of.id, of.name, of.user
        self.server, self.take = of.server, of.take

    def down(self, action: Callable[[], object], in_order: bool = True) -> None:
        pass

    def tell_reach(self) -> None:
        pass

    def cut(self, for_s: float) -> None:
        pass

    def break_off(self) -> None:
        self.server.leave(self)


class Route(Wire):
    """Between two servers."""

    def __init__(self, one: "Server", other: "Server") -> None:
        super().__init__(one.bus)
        self.ends = one, other
        self.is_open = True

    @property
    def flows(self) -> bool:
        return self.is_open and self._can_open

    @property
    def _can_open(self) -> bool:
        return not self.is_cut and all(each.works for each in self.ends)

    def cut(self, for_s: float, *receivers: object) -> None:
        """By default both ways."""
        super().cut(for_s, *(receivers or self.ends))
        self.bus.expect_election()

    def break_off(self) -> None:
        """Also forget what each end knew of the other."""
        if self.is_open:
            self._change(False)
            self.world.after(self.world.random.uniform(*_ROUTE_AGAIN_S), self._again)

    def _again(self) -> None:
        if self._can_open:
            self._change(True)
        else:
            self.world.after(self.world.random.uniform(*_ROUTE_AGAIN_S), self._again)

    def _change(self, is_open: bool) -> None:
        self.is_open = is_open
        self._life += 1
        one, other = self.ends
        self.world.note("route" if is_open else "no route", one.name, other.name)
        one.meet(other)
        other.meet(one)
