"""Which transport two workers use (pure): what both have and what reaches, then what was measured.

Before anything was measured: shared memory where the hosts are one, UCX before TCP where both name it (it is
an extra that somebody installed for its sake). A transport that failed is set aside for a while, except the
last one left. Knows no sockets.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shared.average import averaged

_PRIOR = ("shm", "ucx", "tcp")
_WEIGHT = 0.3
"""Of the newest measurement."""
_PENALTY_S = 30.0
_FRESH_S = 600.0
"""For so long a comparison holds."""
_LEAST_BYTES = 256 << 10
"""Smaller transfers tell nothing about bandwidth."""
_CLEARLY = 1.2
"""So many times faster a transport has to be measured to displace one that comes first otherwise."""


@dataclass
class TransportChoice:
    """Of one worker, for all its peers. `check_integrity` after every step in the tests."""

    own: Collection[str]
    """Transports that this worker can dial by."""
    host: str
    gb_per_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """By peer and transport; exponentially weighted."""
    compared_s: dict[str, float] = field(default_factory=dict)
    """By peer: when its transports were last measured side by side."""
    aside_until_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def on_transfer(self, peer: str, transport: str, size_bytes: int, took_s: float) -> None:
        """It succeeded, with nothing else done meanwhile; small ones are not counted."""
        if size_bytes < _LEAST_BYTES or took_s <= 0:
            return
        key, now = (peer, transport), size_bytes / took_s / 1e9
        self.gb_per_s[key] = averaged(self.gb_per_s.get(key), now, _WEIGHT)

    def needs_comparison(self, peer: str, now_s: float) -> bool:
        """Nobody has measured its transports side by side, or long ago."""
        return now_s >= self.compared_s.get(peer, float("-inf")) + _FRESH_S

    def on_compared(self, peer: str, now_s: float) -> None:
        """They were measured as far as they work."""
        self.compared_s[peer] = now_s

    def on_failure(self, peer: str, transport: str, now_s: float) -> None:
        """It could not be dialled, or broke."""
        self.aside_until_s[peer, transport] = now_s + _PENALTY_S

    def on_lost(self, peer: str) -> None:
        """The worker is gone: what is known of it is forgotten."""
        for table in (self.gb_per_s, self.aside_until_s):
            for key in [key for key in table if key[0] == peer]:
                del table[key]
        self.compared_s.pop(peer, None)

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

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert all(speed > 0 for speed in self.gb_per_s.values())

    def _is_clearly_faster(self, peer: str, one: str, other: str) -> bool:
        mine, theirs = self.gb_per_s.get((peer, one)), self.gb_per_s.get((peer, other))
        return mine is not None and theirs is not None and mine > theirs * _CLEARLY
