"""A nats-server in a world.

The server routes what is published, keeps the order of each connection, and keeps buckets of keys and values.
A connection may be slow, be cut for a while, or be reset; single messages may be lost, come twice, or be
overtaken while there is noise. Knows no message.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import nats.js.errors

from shared import subjects
from tests.simulation.world import A_MOMENT_S, Process, World

_DELAYS_S = (0.0001, 0.0002, 0.0005, 0.002)
_DETECT_S = 2.0
"""A connection that is cut for longer breaks."""
_RECONNECT_S = (0.02, 0.3)
MOST_PAYLOAD_BYTES = 1 << 20


@dataclass
class Noise:
    """What happens to single messages, by probability."""

    loss: float = 0.0
    twice: float = 0.0
    overtaken: float = 0.0
    delay_s: float = 0.0
    """More than usual, at most."""


@dataclass(eq=False)
class Interest:
    connection: "Connection"
    sid: int
    subject: str
    queue: str


@dataclass
class Bucket:
    revisions: Iterator[int]
    values: dict[str, tuple[bytes, int]] = field(default_factory=dict)


class Server:
    """The one of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.noise = Noise()
        self.is_up = True
        self.connections: dict[int, Connection] = {}
        self.buckets: dict[str, Bucket] = {}
        self._ids = count(1)
        self.starts = 0
        """So often it was started again. One that dies tells nobody which connections end with it."""
        self._interests: list[Interest] = []
        self._routes: dict[str, list[Interest]] = {}
        self.rewrite: Callable[[str, bytes], bytes] = lambda sender, data: data
        """What a process of another version would have sent."""
        self.on_put: Callable[[str, bytes], object] = lambda key, value: None
        """A value was written."""
        self.on_route: Callable[[str, bytes], object] = lambda subject, data: None
        """Something was published."""
        self.published = 0
        self.all: list[Connection] = []
        world.server = self

    def delay_s(self) -> float:
        random = self.world.random
        more_s = random.random() * self.noise.delay_s if self.noise.delay_s else 0.0
        return random.choice(_DELAYS_S) + more_s

    # --- connections

    def enter(self, connection: "Connection") -> None:
        connection.id = next(self._ids)
        self.connections[connection.id] = connection
        self._announce(subjects.BUS_CONNECTED, connection)

    def leave(self, connection: "Connection") -> None:
        if self.connections.pop(connection.id, None) is None:
            return
        self._interests = [each for each in self._interests if each.connection is not connection]
        self._routes.clear()
        self._announce(subjects.BUS_DISCONNECTED, connection)

    def _announce(self, subject: str, connection: "Connection") -> None:
        if self.is_up:
            server = {"name": "kvasir", "id": f"N{self.starts}"}
            client = {"id": connection.id, "user": connection.user, "name": connection.name}
            self.route(subject, json.dumps({"server": server, "client": client}).encode())

    def add(self, interest: Interest) -> None:
        if interest.connection.id in self.connections:
            self._interests.append(interest)
            self._routes.clear()

    def remove(self, connection: "Connection", sid: int) -> None:
        self._interests = [e for e in self._interests if e.connection is not connection or e.sid != sid]
        self._routes.clear()

    # --- messages

    def route(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: dict[str, str] | None = None,
        sender: "Connection | None" = None,
    ) -> None:
        """To everybody who wants it."""
        self.published += 1
        name = "server" if sender is None else sender.name
        self.on_route(subject, data)
        self.world.note(name, subject, len(data), blake2b(data, digest_size=6).hexdigest())
        wanted = self._routes.get(subject)
        if wanted is None:
            wanted = [each for each in self._interests if _matches(each.subject, subject)]
            self._routes[subject] = wanted
        groups: dict[str, list[Interest]] = {}
        for each in wanted:
            if each.queue:
                groups.setdefault(each.queue, []).append(each)
            else:
                self._deliver(each, subject, data, reply, headers)
        for members in groups.values():
            self._deliver(self.world.random.choice(members), subject, data, reply, headers)
        if not wanted and reply:
            self.route(reply, b"", headers={"Status": "503"})

    def _deliver(
        self, interest: Interest, subject: str, data: bytes, reply: str, headers: dict[str, str] | None
    ) -> None:
        noise, random = self.noise, self.world.random
        if noise.loss and random.random() < noise.loss:
            self.world.note("lost", subject)
            return
        connection = interest.connection
        in_order = not (noise.overtaken and random.random() < noise.overtaken)
        connection.down(lambda: connection.take(interest.sid, subject, data, reply, headers), in_order)
        if noise.twice and random.random() < noise.twice:
            connection.down(lambda: connection.take(interest.sid, subject, data, reply, headers), False)

    # --- keys and values

    def bucket(self, name: str) -> Bucket:
        if name not in self.buckets:
            raise nats.js.errors.BucketNotFoundError
        return self.buckets[name]

    def put(self, name: str, key: str, value: bytes, last: int) -> int:
        bucket = self.bucket(name)
        values = bucket.values
        present = values[key][1] if key in values else 0
        if present != last:
            raise nats.js.errors.KeyWrongLastSequenceError
        revision = next(bucket.revisions)
        values[key] = (value, revision)
        self.world.note("key", key, revision, value)
        self.on_put(key, value)
        return revision

    # --- faults

    def restart(self, down_s: float) -> None:
        """All connections break, and come back; what it kept in memory is gone."""
        self.is_up = False
        self.buckets.clear()
        self.starts += 1
        for connection in list(self.connections.values()):
            connection.break_off(back_after_s=down_s)

        def up() -> None:
            self.is_up = True

        self.world.after(down_s, up)


class Connection:
    """The server's side of one, and the wire between: what goes up and what goes down stays in order."""

    def __init__(self, server: Server, process: Process, name: str, user: str) -> None:
        self.server, self.process, self.world = server, process, process.world
        self.name, self.user = name, user
        self.id, self.is_open = 0, False
        self.breaks = 0
        """So often it broke off."""
        self._life, self._cut_until_s = 0, 0.0
        self._last_up_s = self._last_down_s = 0.0
        process.on_death.append(self._on_death)
        self.take: Callable[..., None] = lambda *_: None
        """At the client: a message of a subscription."""
        self.on_broken: Callable[[], None] = lambda: None
        self.on_back: Callable[[], None] = lambda: None
        server.all.append(self)

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
        return max(after_s + A_MOMENT_S, max(now_s, self._cut_until_s) + self.server.delay_s())

    def open(self) -> None:
        self.is_open = True
        self._life += 1
        self._last_up_s = self._last_down_s = self.world.now_s
        self.server.enter(self)

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
        if for_s > _DETECT_S:
            life = self._life

            def notice() -> None:
                if self._life == life:
                    self.break_off(back_after_s=for_s - _DETECT_S)

            self.world.after(_DETECT_S, notice)

    def break_off(self, back_after_s: float) -> None:
        """What is under way is lost, both ways."""
        if not self.is_open:
            return
        self.breaks += 1
        self.close()
        self.process.loop.call_from_outside(self.on_broken)
        self.world.after(back_after_s + self.world.random.uniform(*_RECONNECT_S), self._again)

    def _again(self) -> None:
        if not self.process.alive or self.is_open:
            return
        if not self.server.is_up or self.process.frozen_until_s > self.world.now_s:
            self.world.after(_RECONNECT_S[1], self._again)
            return
        self.process.loop.call_from_outside(self.on_back)

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


def _matches(wanted: str, subject: str) -> bool:
    if "*" not in wanted and ">" not in wanted:
        return wanted == subject
    parts, given = wanted.split("."), subject.split(".")
    for at, part in enumerate(parts):
        if part == ">":
            return len(given) > at
        if at >= len(given) or part not in ("*", given[at]):
            return False
    return len(parts) == len(given)
