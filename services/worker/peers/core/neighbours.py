"""A worker's view of its peers: heartbeats, link speeds, and which transport to dial. Pure.

Two speeds are kept per peer. Links, and whether queries or blocks travel, are chosen by the raw speed of a
link. Heartbeats report the delivered speed of whole fetches, because a sequence that moves waits for them;
until the first fetch, they report the raw speed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shared.average import averaged
from shared.liveness import Liveness
from shared.messages.reports import WorkerReported

SILENCE_S = 5.0
"""Time awake after which a peer without a heartbeat counts as gone."""
_MOST_NEIGHBOURS = 4096
LEAST_BYTES = 64 << 10
"""Smaller transfers are not used to measure a link."""
_WEIGHT = 0.3
"""Weight of the newest measurement in the moving average."""
_PRIOR = ("shm", "ucx", "tcp")
_PENALTY_S = 30.0
_FRESH_S = 600.0
"""Time for which a comparison of transports is valid."""
_CLEARLY = 1.2
"""Factor by which a transport must be faster to go before one that `_PRIOR` prefers."""


@dataclass(frozen=True, slots=True)
class HeardWorker:
    """Another worker, as described by its latest heartbeat."""

    incarnation: int
    host: str
    model: str
    lendable_tokens: int
    """Most KV that it ever lends."""
    free_fraction: float
    """Share of its own KV that is free."""


class Neighbours:
    """Other workers heard within the last `SILENCE_S`."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._alive = Liveness(SILENCE_S)
        self.known: dict[str, HeardWorker] = {}
        """By worker id."""

    def hear(self, report: WorkerReported, awake_s: float) -> bool:
        """Take in any worker's heartbeat. Return whether the worker has restarted since its last one."""
        name, capacity = report.worker_id, report.capacity
        before = self.known.get(name)
        if name == self._own_id or (before is None and len(self.known) >= _MOST_NEIGHBOURS):
            return False
        if not self._alive.hear(name, report.incarnation, awake_s):
            return False
        self.known[name] = HeardWorker(
            incarnation=report.incarnation,
            host=report.host,
            model=report.model,
            lendable_tokens=capacity.most_lent_blocks * report.block_tokens,
            free_fraction=capacity.plannable_blocks / max(1, capacity.total_blocks),
        )
        return before is not None and before.incarnation != report.incarnation

    def silent(self, awake_s: float) -> list[str]:
        """Remove and return the workers that fell silent since the last call."""
        gone = self._alive.silent(awake_s)
        for name in gone:
            del self.known[name]
        return gone

    def lendable_tokens(self, model: str) -> int:
        """Return the most that all other workers with this model lend."""
        return sum(one.lendable_tokens for one in self.known.values() if one.model == model)


@dataclass(slots=True)
class LinkRate:
    """Speed of one transport from one worker. Threads share it: a concurrent measurement may be lost."""

    bytes_per_s: float | None = None
    """None: not measured yet."""

    def on_carried(self, size_bytes: int, took_s: float) -> None:
        """Record a transfer that had the link to itself."""
        if size_bytes >= LEAST_BYTES and took_s > 0:
            self.bytes_per_s = averaged(self.bytes_per_s, size_bytes / took_s, _WEIGHT)


class LinkRates:
    """A worker's table of link speeds from its peers.

    Any thread may call `link`. Everything else runs on the event loop and iterates over a copy.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], LinkRate] = {}
        self._delivered: dict[str, float] = {}

    def link(self, peer: str, transport: str) -> LinkRate:
        """Return the shared entry for links to that peer by that transport."""
        return self._links.setdefault((peer, transport), LinkRate())

    def on_delivered(self, peer: str, size_bytes: int, took_s: float) -> None:
        """Record a whole fetch: asked for, sent, verified and stored in `took_s`."""
        if size_bytes > 0 and took_s > 0:
            self._delivered[peer] = averaged(self._delivered.get(peer), size_bytes / took_s, _WEIGHT)

    def bytes_per_s(self, peer: str) -> float | None:
        """Return the expected speed of a fetch from that peer; None before any measurement."""
        links = [rate.bytes_per_s for (name, _), rate in self._links.copy().items() if name == peer]
        return self._delivered.get(peer) or max((each for each in links if each is not None), default=None)

    def forget(self, peer: str) -> None:
        """Drop the speeds of a peer that left or restarted."""
        self._delivered.pop(peer, None)
        for key in [key for key in self._links.copy() if key[0] == peer]:
            del self._links[key]


@dataclass
class TransportChoice:
    """Chooses the transport to dial each peer by: one that both have, and the fastest by measurement.

    Before any measurement, shared memory comes first on one host, then UCX, then TCP. A transport that failed
    is set aside for a while, unless it is the only one left."""

    own: Collection[str]
    """Transports that this worker can dial."""
    host: str
    rates: LinkRates = field(default_factory=LinkRates)
    compared_s: dict[str, float] = field(default_factory=dict)
    """When each peer's transports were last compared."""
    aside_until_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def needs_comparison(self, peer: str, now_s: float) -> bool:
        """Return whether the peer's transports were never compared, or long ago."""
        return now_s >= self.compared_s.get(peer, float("-inf")) + _FRESH_S

    def on_failure(self, peer: str, transport: str, now_s: float) -> None:
        """Set aside a transport that could not be dialled, or broke."""
        self.aside_until_s[peer, transport] = now_s + _PENALTY_S

    def forget(self, peer: str) -> None:
        """Drop all that is known of a peer that left or restarted."""
        self.rates.forget(peer)
        self.compared_s.pop(peer, None)
        for key in [key for key in self.aside_until_s if key[0] == peer]:
            del self.aside_until_s[key]

    def ranking(self, peer: str, addresses: Mapping[str, str], host: str, now_s: float) -> list[str]:
        """Return the transports to try, best first; empty when the two have none in common."""
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
