"""The nats-servers of a world: one, or three that form a cluster.

A server routes what is published, and forwards what clients of another server want, one hop. Single messages
may be lost, come twice, or be overtaken while there is noise. Knows no message.

Keys and values have one history, of which the servers have copies: its leader writes while a majority agrees.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import combinations, count
from types import SimpleNamespace
from typing import Any

import nats.js.errors

from shared import subjects
from tests.simulation.wires import Connection, DeadEnd, Route
from tests.simulation.world import World

_DELAYS_S = (0.0001, 0.0002, 0.0005, 0.002)
_ELECTION_S = (4.0, 9.0)
_CONSENT_S = 0.05
_PINGS_S = (10.0, 15.0)
MOST_PAYLOAD_BYTES = 1 << 20

Settle = Callable[[Any, Exception | None], object]


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
    server: "Server"
    connection: Connection | DeadEnd
    sid: int
    subject: str
    queue: str


@dataclass
class Bucket:
    first: int
    in_files: bool
    leader: "Server | None"
    revisions: Iterator[int] = field(init=False)
    term: int = 0
    """Grows with each leader: what an earlier one has proposed is forgotten."""
    values: dict[str, tuple[bytes, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.revisions = count(self.first)

    def forget(self) -> None:
        """All its servers were down: in memory nothing is left but its configuration."""
        if not self.in_files:
            self.values, self.revisions = {}, count(self.first)


class Bus:
    """All servers of a world, and what is between them and the processes."""

    def __init__(self, world: World, servers: int) -> None:
        self.world = world
        self.noise = Noise()
        self.buckets: dict[str, Bucket] = {}
        self.losses = 0
        """So often the buckets were lost: a single server has them in memory."""
        self.rewrite: Callable[[str, bytes], bytes] = lambda sender, data: data
        """What a process of another version would have sent."""
        self.on_put: Callable[[str, bytes, int], object] = lambda key, value, revision: None
        """A value was written."""
        self.on_route: Callable[[str, bytes], object] = lambda subject, data: None
        """Something was published."""
        self.all: list[Connection] = []
        self.cut_until_s: dict[object, float] = {}
        """Processes, and pairs of hosts: they reach nobody, or not each other, before."""
        self.servers = [Server(self, f"nats-{number}") for number in range(servers)]
        self.home = {each.name: each for each in self.servers}
        """The server on the host of each process and server, by name."""
        for one, other in combinations(self.servers, 2):
            one.routes[other] = other.routes[one] = Route(one, other)
        world.bus = self

    def delay_s(self) -> float:
        random = self.world.random
        more_s = random.random() * self.noise.delay_s if self.noise.delay_s else 0.0
        return random.choice(_DELAYS_S) + more_s

    def at(self, url: str) -> "Server":
        """The one with this address."""
        return self.home[url.removeprefix("nats://").partition(":")[0]]

    def apart_until_s(self, one: str, other: str) -> float:
        """When two reach each other again."""
        keys = one, other, frozenset((self.home.get(one), self.home.get(other)))
        return max(self.cut_until_s.get(key, 0.0) for key in keys)

    def part(self, one: "Server", other: "Server", for_s: float) -> None:
        """Two hosts lose each other."""
        one.routes[other].cut(for_s)
        hosts = {one, other}
        self.cut_until_s[frozenset(hosts)] = self.world.now_s + for_s
        for each in self.all:
            if each.is_open and {each.server, self.home[each.process.name]} == hosts:
                each.cut(for_s)

    # --- the leader of the buckets

    def expect_election(self) -> None:
        """Servers have died, or do not hear each other. A while later they have settled who leads."""
        if len(self.servers) > 1:
            self.world.after(self.world.random.uniform(*_ELECTION_S), self._elect)

    def _elect(self) -> None:
        random, able = self.world.random, [each for each in self.servers if each.has_majority]
        for bucket in self.buckets.values():
            leader = bucket.leader
            deaf = [each for each in able if leader is not None and not each.reaches(leader)]
            if deaf or not able:
                self.expect_election()
            if not able or (leader in able and not (deaf and random.random() < 0.5)):
                continue
            if leader is not None and leader not in able:
                leader.stale = dict(bucket.values)
            self.lead(bucket, random.choice(deaf or able))

    def lead(self, bucket: Bucket, leader: "Server | None") -> None:
        bucket.leader, bucket.term = leader, bucket.term + 1
        self.world.note("leader of the buckets", leader and leader.name)


class Server:
    """One. It knows what its clients want, and what those of each server with an open route want."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus, self.name, self.world = bus, name, bus.world
        self.url = f"nats://{name}:4222"
        self.is_up, self.hangs_until_s = True, 0.0
        self.connections: dict[int, Connection | DeadEnd] = {}
        self.routes: dict[Server, Route] = {}
        self.stale: dict[str, tuple[bytes, int]] | None = None
        """Values as they were when another server took the lead, unknown to this one."""
        self._ids = count(1)
        self._starts = 0
        """So often it was started again. One that dies tells nobody which connections end with it."""
        self._interests: defaultdict[Server, list[Interest]] = defaultdict(list)
        self._found: dict[str, list[Interest]] = {}

    @property
    def works(self) -> bool:
        return self.is_up and self.hangs_until_s <= self.world.now_s

    # --- connections

    def enter(self, connection: Connection) -> None:
        connection.id = next(self._ids)
        self.connections[connection.id] = connection
        self._announce(subjects.BUS_CONNECTED, connection)

    def lose(self, connection: Connection) -> None:
        """It broke off, and this server does not know before it is reached again, or has missed two pings."""
        end = self.connections[connection.id] = DeadEnd(connection)
        for each in self._interests[self]:
            if each.connection is connection:
                each.connection = end
        noticed_s = min(
            connection.cut_for_s + self.world.random.uniform(0.0, 0.5), self.world.random.uniform(*_PINGS_S)
        )
        self.world.after(noticed_s, end.break_off)

    def leave(self, connection: Connection | DeadEnd) -> None:
        if self.connections.pop(connection.id, None) is not None:
            self.remove(connection)
            self._announce(subjects.BUS_DISCONNECTED, connection)

    def _announce(self, subject: str, connection: Connection | DeadEnd) -> None:
        if not self.is_up:
            return
        server = {"name": self.name, "id": f"N{self._starts}"}
        client = {"id": connection.id, "user": connection.user, "name": connection.name}
        data = json.dumps({"server": server, "client": client}).encode()
        if self.works:
            self.route(subject, data)
        else:  # it will notice
            self.world.at(self.hangs_until_s, lambda: self.route(subject, data) if self.works else None)

    def add(self, interest: Interest) -> None:
        if self.connections.get(interest.connection.id) is interest.connection:
            for each in (self, *self.routes):
                self._tell(each, partial(each.learn, [interest]))

    def remove(self, connection: Connection | DeadEnd, sid: int | None = None) -> None:
        """One of its interests, or all."""
        own = [each for each in self._interests[self] if each.connection is connection]
        gone = [each for each in own if sid in (None, each.sid)]
        for each in (self, *self.routes):
            self._tell(each, partial(each.unlearn, self, gone))

    def _tell(self, server: "Server", what: Callable[[], object]) -> None:
        if server is self:
            what()
        elif self.routes[server].is_open:
            self.routes[server].carry(server, what)

    # --- what servers know of each other

    def learn(self, interests: list[Interest]) -> None:
        for each in interests:
            self._interests[each.server].append(each)
        self._found.clear()

    def unlearn(self, server: "Server", interests: list[Interest]) -> None:
        self._interests[server] = [each for each in self._interests[server] if each not in interests]
        self._found.clear()

    @property
    def told(self) -> list[str]:
        """Addresses that it tells its clients."""
        return [self.url, *(each.url for each, route in self.routes.items() if route.is_open)]

    def meet(self, other: "Server") -> None:
        """A route to it has opened, or closed."""
        for connection in self.connections.values():
            connection.tell_reach()
        self._interests[other] = []
        self._found.clear()
        self._tell(other, partial(other.learn, list(self._interests[self])))

    # --- messages

    def route(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: dict[str, str] | None = None,
        sender: Connection | None = None,
    ) -> None:
        """To everybody who wants it."""
        name = "server" if sender is None else sender.name
        self.bus.on_route(subject, data)
        self.world.note(name, subject, len(data), blake2b(data, digest_size=6).hexdigest())
        wanted = self._wanting(subject)
        far: dict[Server, set[str]] = {}
        """By server: the queues of which a member there is meant; "" for who is in none."""
        for each in self._picked(wanted):
            if each.server is self:
                self._deliver(each, subject, data, reply, headers)
            else:
                far.setdefault(each.server, set()).add(each.queue)
        for server, queues in far.items():
            self._tell(server, partial(server._take, queues, subject, data, reply, headers))
        if not wanted and reply:
            self.route(reply, b"", headers={"Status": "503"})

    def _take(self, queues: set[str], subject: str, *message: Any) -> None:
        """Over a route: nothing of it goes further."""
        wanted = (each for each in self._wanting(subject) if each.server is self and each.queue in queues)
        for each in self._picked(wanted):
            self._deliver(each, subject, *message)

    def _picked(self, wanted: Iterable[Interest]) -> list[Interest]:
        """All, but of each queue one: one here, if there is any."""
        groups: dict[str, list[Interest]] = {}
        for each in wanted:
            groups.setdefault(each.queue, []).append(each)
        picked = groups.pop("", [])
        for members in groups.values():
            near = [each for each in members if each.server is self]
            picked.append(self.world.random.choice(near or members))
        return picked

    def _wanting(self, subject: str) -> list[Interest]:
        found = self._found.get(subject)
        if found is None:
            known = (each for of_server in self._interests.values() for each in of_server)
            found = self._found[subject] = [each for each in known if _matches(each.subject, subject)]
        return found

    def _deliver(
        self, interest: Interest, subject: str, data: bytes, reply: str, headers: dict[str, str] | None
    ) -> None:
        noise, random = self.bus.noise, self.world.random
        if noise.loss and random.random() < noise.loss:
            self.world.note("lost", subject)
            return
        connection = interest.connection
        in_order = not (noise.overtaken and random.random() < noise.overtaken)
        connection.down(lambda: connection.take(interest.sid, subject, data, reply, headers), in_order)
        if noise.twice and random.random() < noise.twice:
            connection.down(lambda: connection.take(interest.sid, subject, data, reply, headers), False)

    # --- keys and values

    def reaches(self, other: "Server") -> bool:
        return other is self or self.routes[other].flows

    @property
    def has_majority(self) -> bool:
        return self.works and 2 * sum(map(self.reaches, self.bus.servers)) > len(self.bus.servers)

    def consult(self, name: str, ask: Callable[["Server"], Any], settle: Settle, is_write: bool) -> None:
        """The bucket's leader does it, or a server that takes itself for it. If none is reached, nothing
        may come back."""
        bucket, random = self.bus.buckets.get(name), self.world.random
        for each in self.bus.servers:
            if each.has_majority:
                each.stale = None
        if bucket is None:
            leaders = [self] if self.has_majority else []
        else:
            leaders = [each for each in self.bus.servers if each is bucket.leader or each.stale is not None]
        leaders = [each for each in leaders if each is self or self.routes[each].is_open]
        if leaders:
            leader = random.choice(leaders)
            term = 0 if bucket is None else bucket.term

            def answer(result: Any, error: Exception | None) -> None:
                leader._tell(self, partial(settle, result, error))

            self._tell(leader, partial(leader._do, bucket, term, ask, answer, is_write))
        elif random.random() < 0.5:
            settle(None, nats.js.errors.ServiceUnavailableError())

    def _do(self, bucket: Bucket | None, term: int, ask: Any, answer: Settle, is_write: bool) -> None:
        """A write waits until a majority agrees, or another server leads."""
        if is_write and bucket is not None:
            if bucket.leader is not self or bucket.term != term:
                return
            if not self.has_majority:
                self.world.after(_CONSENT_S, partial(self._do, bucket, term, ask, answer, is_write))
                return
        try:
            result = ask(self)
        except nats.js.errors.Error as error:
            answer(None, error)
        else:
            answer(result, None)

    def bucket(self, name: str) -> Bucket:
        if name not in self.bus.buckets:
            raise nats.js.errors.BucketNotFoundError
        return self.bus.buckets[name]

    def make_bucket(self, name: str, first: int, in_files: bool) -> None:
        """Unless it is there."""
        if name not in self.bus.buckets:
            able = [each for each in self.bus.servers if self.reaches(each)]
            self.bus.buckets[name] = Bucket(first, in_files, self.world.random.choice(able))

    def get(self, name: str, key: str) -> tuple[bytes, int]:
        values = self.bucket(name).values if self.stale is None else self.stale
        if key not in values:
            raise nats.js.errors.KeyNotFoundError
        return values[key]

    def put(self, name: str, key: str, value: bytes, last: int) -> int:
        bucket = self.bucket(name)
        values = bucket.values
        present = values[key][1] if key in values else 0
        if present != last:
            raise nats.js.errors.KeyWrongLastSequenceError
        revision = next(bucket.revisions)
        values[key] = (value, revision)
        self.world.note("key", key, revision, value)
        self.bus.on_put(key, value, revision)
        return revision

    def info(self, name: str, subjects_filter: str) -> SimpleNamespace:
        replicas = [SimpleNamespace(name=each.name, current=self.reaches(each)) for each in self.routes]
        keys = {subjects_filter.replace(">", key): 1 for key in self.bucket(name).values}
        return SimpleNamespace(
            cluster=SimpleNamespace(leader=self.name, replicas=replicas), state=SimpleNamespace(subjects=keys)
        )

    def step_down(self, name: str, to: str) -> None:
        """If this server leads, and reaches the one that is to lead."""
        bucket = self.bucket(name)
        for each in self.routes:
            if each.name == to and bucket.leader is self and self.reaches(each):
                self.bus.lead(bucket, each)

    # --- faults

    def restart(self, down_s: float) -> None:
        """All connections break, and come back; what it kept in memory is gone."""
        self.is_up, self.stale, self.hangs_until_s = False, None, 0.0
        self._starts += 1
        if not self.routes:
            self.bus.buckets.clear()
            self.bus.losses += 1
        for bucket in self.bus.buckets.values():
            if bucket.leader is self:
                self.bus.lead(bucket, None)
            if not any(each.is_up for each in self.routes):
                bucket.forget()
        for route in self.routes.values():
            route.break_off()
        for connection in list(self.connections.values()):
            connection.break_off()
        self.bus.expect_election()
        life = self._starts

        def up() -> None:
            self.is_up = self.is_up or self._starts == life

        self.world.after(down_s, up)

    def hang(self, for_s: float) -> None:
        """Stop reading for so long. Messages are read later if their senders have waited."""
        self.hangs_until_s = max(self.hangs_until_s, self.world.now_s + for_s)
        for connection in self.connections.values():
            connection.cut(for_s)
        for route in self.routes.values():
            route.cut(for_s)
        self.bus.expect_election()


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
