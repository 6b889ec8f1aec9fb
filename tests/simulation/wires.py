"""Connections between processes and nats-servers, and routes between servers. Messages arrive in order."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tests.simulation.world import A_MOMENT_S, Process

if TYPE_CHECKING:
    from tests.simulation.bus import Bus, Server

_DETECT_S, _DETECT_IN_CLUSTER_S = 2.0, (0.8, 1.2)
"""A connection that is cut for longer breaks."""
_ROUTE_DETECT_S = (0.6, 0.75)
_ROUTE_AGAIN_S = (0.05, 1.0)


class Connection:
    """The server's side of one, and the wire between: what goes up and what goes down stays in order."""

    server: "Server"
    """The one it goes to, or went to last."""

    def __init__(self, bus: "Bus", process: Process, name: str, user: str) -> None:
        self.bus, self.process, self.world = bus, process, process.world
        self.name, self.user = name, user
        self.id, self.since_s, self.is_open = 0, 0.0, False
        self.breaks = 0
        """So often it broke off."""
        self._life, self._cut_until_s = 0, 0.0
        self._last_up_s = self._last_down_s = 0.0
        process.on_death.append(self._on_death)
        self.take: Callable[..., None] = lambda *_: None
        """At the client: a message of a subscription."""
        self.on_broken: Callable[[float], None] = lambda away_s: None
        """Given the time for which it cannot come back."""
        bus.all.append(self)

    def up(self, action: Callable[[], object]) -> None:
        """At the server, in order, if the connection lasts so long."""
        life = self._life
        self._last_up_s = self._due_s(self._last_up_s)
        self.world.at(self._last_up_s, lambda: self._life == life and action())

    def down(self, action: Callable[[], object], in_order: bool = True) -> None:
        """At the client."""
        life = self._life
        due_s = self._due_s(self._last_down_s if in_order else 0.0)
        if in_order:
            self._last_down_s = due_s

        def arrive() -> None:
            if self._life == life and self.process.alive:
                self.process.loop.call_from_outside(lambda: self._life == life and action())

        self.world.at(due_s, arrive)

    def _due_s(self, after_s: float) -> float:
        now_s = self.world.now_s
        return max(after_s + A_MOMENT_S, max(now_s, self._cut_until_s) + self.bus.delay_s())

    def reach_s(self, server: "Server") -> float:
        """Seconds until that server answers who dials it now."""
        until_s = max(server.hangs_until_s, self.bus.apart_until_s(self.process.name, server.name))
        return max(0.0, until_s - self.world.now_s) + self.bus.delay_s()

    def open(self, server: "Server") -> None:
        self.server, self.is_open = server, True
        self._life += 1
        self._last_up_s = self._last_down_s = self.world.now_s
        self._cut_until_s = 0.0
        server.enter(self)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._life += 1
            self.server.leave(self)

    def cut(self, for_s: float) -> None:
        """Nothing goes through for so long; it breaks if that is noticed."""
        if not self.is_open:
            return
        self._cut_until_s = max(self._cut_until_s, self.world.now_s + for_s)
        detect_s = self.world.random.uniform(*_DETECT_IN_CLUSTER_S) if self.server.routes else _DETECT_S
        if for_s > detect_s:
            life = self._life
            self.world.after(detect_s, lambda: self.break_off() if self._life == life else None)

    def break_off(self, away_s: float = 0.0) -> None:
        """What is under way is lost, both ways."""
        if not self.is_open:
            return
        self.breaks += 1
        self.close()
        self.process.loop.call_from_outside(self.on_broken, away_s)

    def _on_death(self) -> None:
        """The system closes it; the server sees that at once."""
        if self.is_open:
            life = self._life
            self.is_open = False

            def gone() -> None:
                if self._life == life:
                    self._life += 1
                    self.server.leave(self)

            self.world.at(max(self.world.now_s, self._cut_until_s) + 0.001, gone)


class Route:
    """Between two servers. What either sends arrives in order, or not at all."""

    def __init__(self, one: "Server", other: "Server") -> None:
        self._ends, self._bus, self._world = (one, other), one.bus, one.world
        self.is_open = True
        self._life = 0
        self._last_s = dict.fromkeys(self._ends, 0.0)
        self._cut_until_s = dict.fromkeys(self._ends, 0.0)
        """By receiver."""

    @property
    def flows(self) -> bool:
        return self.is_open and self._can_open

    @property
    def _can_open(self) -> bool:
        is_cut = max(self._cut_until_s.values()) > self._world.now_s
        return not is_cut and all(each.works for each in self._ends)

    def send(self, receiver: "Server", what: Callable[[], object]) -> None:
        if self.is_open:
            life = self._life
            due_s = max(self._world.now_s, self._cut_until_s[receiver]) + self._bus.delay_s()
            self._last_s[receiver] = due_s = max(self._last_s[receiver] + A_MOMENT_S, due_s)
            self._world.at(due_s, lambda: self._life == life and what())

    def cut(self, for_s: float, receivers: Collection["Server"] = ()) -> None:
        """Nothing reaches these, or both; the servers notice it if it lasts."""
        for each in receivers or self._ends:
            self._cut_until_s[each] = max(self._cut_until_s[each], self._world.now_s + for_s)
        detect_s, life = self._world.random.uniform(*_ROUTE_DETECT_S), self._life
        if for_s > detect_s:
            self._world.after(detect_s, lambda: self.close() if self._life == life else None)
        self._bus.expect_election()

    def close(self) -> None:
        """What is under way is lost, and so is what each knew of the other."""
        if self.is_open:
            self.is_open = False
            self._life += 1
            one, other = self._ends
            one.forget(other)
            other.forget(one)
            self._world.note("no route", one.name, other.name)
            self._again()

    def _again(self) -> None:
        def open_() -> None:
            if not self._can_open:
                return self._again()
            self.is_open = True
            one, other = self._ends
            self._world.note("route", one.name, other.name)
            one.meet(other)
            other.meet(one)

        self._world.after(self._world.random.uniform(*_ROUTE_AGAIN_S), open_)
