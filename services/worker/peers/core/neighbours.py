"""What a worker knows of the others: their heartbeats, how fast links to them are, which are used. Pure.

Everybody who goes from worker to worker reads these tables: migration (what a fetch of blocks takes), remote
attention (whether queries travel or blocks do), lending (who is short and how far away) and the transports
themselves (which of several to dial).

Two speeds are measured of a peer, and they are not the same thing:

    rates.link("w1", "shm").on_carried(2 << 20, 0.001)   bytes alone on a link: a probe, a fetch of lent KV
    rates.on_delivered("w1", 8 << 20, 0.1)               a fetch of blocks, its questions and waits included
    rates.bytes_per_s("w1")  ->  84e6                    for plans of moves: delivered, once there is one

A link is chosen, and queries or blocks are sent, by what links carry; what was delivered wins in heartbeats,
because a sequence that moves waits for the whole of it. Before the first fetch the links' speed stands in,
and the first fetch replaces it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shared.average import averaged
from shared.liveness import Liveness
from shared.messages.reports import WorkerReported

SILENCE_S = 5.0
"""Of time awake; who was not heard for longer is not there."""
_MOST_NEIGHBOURS = 4096
LEAST_BYTES = 64 << 10
"""Smaller transfers say nothing of a link's speed."""
_WEIGHT = 0.3
"""Of the newest measurement."""
_PRIOR = ("shm", "ucx", "tcp")
_PENALTY_S = 30.0
_FRESH_S = 600.0
"""For so long a comparison of transports holds."""
_CLEARLY = 1.2
"""So many times faster a transport has to be measured to displace one that comes first otherwise."""


@dataclass(frozen=True, slots=True)
class HeardWorker:
    """Another worker, as its latest heartbeat describes it."""

    incarnation: int
    host: str
    model: str
    fingerprint: bytes
    """Of its KV; empty where nobody else could read it."""
    lendable_tokens: int
    """Of the KV that it ever lends."""
    free_fraction: float
    """Of its own KV."""


class Neighbours:
    """Who is there: everybody else who was heard within `SILENCE_S`, by worker id."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._alive = Liveness(SILENCE_S)
        self._known: dict[str, HeardWorker] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._known

    def __getitem__(self, worker_id: str) -> HeardWorker:
        return self._known[worker_id]

    def items(self) -> Collection[tuple[str, HeardWorker]]:
        return self._known.items()

    def hear(self, report: WorkerReported, awake_s: float) -> bool:
        """Any worker's heartbeat. Whether what was measured with that worker is of an earlier life of it."""
        name, capacity = report.worker_id, report.capacity
        before = self._known.get(name)
        if name == self._own_id or (before is None and len(self._known) >= _MOST_NEIGHBOURS):
            return False
        if not self._alive.hear(name, report.incarnation, awake_s):
            return False
        self._known[name] = HeardWorker(
            incarnation=report.incarnation,
            host=report.host,
            model=report.model,
            fingerprint=report.fingerprint,
            lendable_tokens=capacity.most_lent_blocks * report.block_tokens,
            free_fraction=capacity.plannable_blocks / max(1, capacity.total_blocks),
        )
        return before is not None and before.incarnation != report.incarnation

    def silent(self, awake_s: float) -> list[str]:
        """Who has fallen silent since the last call: they are there no more."""
        gone = self._alive.silent(awake_s)
        for name in gone:
            del self._known[name]
        return gone

    def lendable_tokens(self, model: str) -> int:
        """What all others with this model lend at most."""
        return sum(one.lendable_tokens for one in self._known.values() if one.model == model)


@dataclass(slots=True)
class LinkRate:
    """What comes from one worker by one transport. Shared by all who use such links, on whatever thread: of
    two measurements made at one moment one may be lost."""

    bytes_per_s: float | None = None
    """None: not measured yet."""

    def on_carried(self, size_bytes: int, took_s: float) -> None:
        """So much arrived in that time, with nothing else done meanwhile."""
        if size_bytes >= LEAST_BYTES and took_s > 0:
            self.bytes_per_s = averaged(self.bytes_per_s, size_bytes / took_s, _WEIGHT)


class LinkRates:
    """How fast what comes from other workers arrives: the one table of a worker.

    `link` is called on any thread, the rest on the event loop: who looks through the links does so in a copy.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], LinkRate] = {}
        self._delivered: dict[str, float] = {}

    def link(self, peer: str, transport: str) -> LinkRate:
        """Of links to that peer by that transport, to read and to add to."""
        return self._links.setdefault((peer, transport), LinkRate())

    def on_delivered(self, peer: str, size_bytes: int, took_s: float) -> None:
        """So much was fetched, verified and stored in that time, questions and waits included."""
        if size_bytes > 0 and took_s > 0:
            self._delivered[peer] = averaged(self._delivered.get(peer), size_bytes / took_s, _WEIGHT)

    def bytes_per_s(self, peer: str) -> float | None:
        """What fetching from there brings; None: nobody has measured anything."""
        links = [rate.bytes_per_s for (name, _), rate in self._links.copy().items() if name == peer]
        return self._delivered.get(peer) or max((each for each in links if each is not None), default=None)

    def forget(self, peer: str) -> None:
        """That worker is gone, or another now."""
        self._delivered.pop(peer, None)
        for key in [key for key in self._links.copy() if key[0] == peer]:
            del self._links[key]


@dataclass
class TransportChoice:
    """Which transport to dial each peer by: what both have and what reaches, then what was measured.

    Before anything was measured: shared memory where the hosts are one, UCX before TCP where both name it (it
    is an extra that somebody installed for its sake). A transport that failed is set aside for a while,
    except the last one left.
    """

    own: Collection[str]
    """Transports that this worker can dial by."""
    host: str
    rates: LinkRates = field(default_factory=LinkRates)
    compared_s: dict[str, float] = field(default_factory=dict)
    """By peer: when its transports were last measured side by side."""
    aside_until_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def needs_comparison(self, peer: str, now_s: float) -> bool:
        """Nobody has measured its transports side by side, or long ago."""
        return now_s >= self.compared_s.get(peer, float("-inf")) + _FRESH_S

    def on_compared(self, peer: str, now_s: float) -> None:
        """They were measured as far as they work."""
        self.compared_s[peer] = now_s

    def on_failure(self, peer: str, transport: str, now_s: float) -> None:
        """It could not be dialled, or broke."""
        self.aside_until_s[peer, transport] = now_s + _PENALTY_S

    def forget(self, peer: str) -> None:
        """The worker is gone, or another now: what is known of the way to it is forgotten, and its rates."""
        self.rates.forget(peer)
        self.compared_s.pop(peer, None)
        for key in [key for key in self.aside_until_s if key[0] == peer]:
            del self.aside_until_s[key]

    def ranking(self, peer: str, addresses: Mapping[str, str], host: str, now_s: float) -> list[str]:
        """The transports to try, best first; empty when the two have none in common."""
        common = [
            name
            for name in _PRIOR
            if name in self.own and name in addresses and (name != "shm" or host == self.host)
        ]
        usable = [name for name in common if self.aside_until_s.get((peer, name), 0.0) <= now_s]
        ranked = usable or common
        for place in range(1, len(ranked)):
            for lower in range(place, 0, -1):
                if not self._is_clearly_faster(peer, ranked[lower], ranked[lower - 1]):
                    break
                ranked[lower - 1], ranked[lower] = ranked[lower], ranked[lower - 1]
        return ranked

    def _is_clearly_faster(self, peer: str, one: str, other: str) -> bool:
        mine, theirs = self.rates.link(peer, one).bytes_per_s, self.rates.link(peer, other).bytes_per_s
        return mine is not None and theirs is not None and mine > theirs * _CLEARLY
