"""Chooses whether queries travel to the keys or keys to the queries, by measured speeds. Pure.

Shipping moves rows · heads numbers and uses the creditor's time. Fetching moves keys, uses local time, and
hides part of the transfer behind the previous layer. So single tokens ship, and long chunks over short
contexts fetch. Source: Infinite-LLM §6.5, figure 12 (papers/001), with speeds measured at run time.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from services.worker.peers.core.neighbours import LinkRate
from shared.average import averaged

_WEIGHT = 0.2
"""Weight of the newest measurement in the moving averages."""
_GUESSED_BYTES_PER_S = 1e9


class ComputeBudget:
    """Budget of `fraction` of each second, saved up to `burst_s`. Idle time is not charged."""

    def __init__(self, fraction: float, burst_s: float = 0.1) -> None:
        if not 0 <= fraction <= 1 or burst_s <= 0:
            raise ValueError(f"not a share of time: {fraction}, saved up to {burst_s} s")
        self._fraction = fraction
        self._burst_s = burst_s
        self._saved_s = burst_s
        self._at_s: float | None = None

    def may_compute(self, now_s: float, *, is_busy: bool) -> bool:
        """Return whether a request may be computed now; `is_busy`: the worker has own steps to run."""
        if self._at_s is not None:
            earned_s = max(0.0, now_s - self._at_s) * self._fraction
            self._saved_s = min(self._burst_s, self._saved_s + earned_s)
        self._at_s = now_s
        return self._fraction > 0 and (not is_busy or self._saved_s > 0)

    def on_computed(self, compute_s: float, *, is_busy: bool) -> None:
        """Charge compute time, unless the worker was idle."""
        if is_busy:
            self._saved_s -= compute_s


class ShipMode(StrEnum):
    """Data that travels for a creditor's part of a step: queries or blocks."""

    SHIP = "ship"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True)
class Work:
    """One holder's part of a step, for one layer."""

    ship_bytes: int
    """Queries, outputs and log-sum-exps."""
    fetch_bytes: int
    """Keys and values of the context."""
    pairs: int
    """Number of pairs of a query head and a key that it sees."""


@dataclass(slots=True)
class CreditorSpeeds:
    """Speeds of one creditor: moving averages that start from a guess.

    The speed of its link is an entry in the worker's table of rates."""

    link: LinkRate = field(default_factory=LinkRate)
    round_trip_s: float = 2e-4
    remote_pair_s: float = 5e-9
    own_pair_s: float = 5e-9
    hidden_s: float = 0.0
    """Part of a layer's time in which the next layer's blocks can travel."""

    @property
    def bytes_per_s(self) -> float:
        """Speed of the link in both directions; a guess before any measurement."""
        return self.link.bytes_per_s or _GUESSED_BYTES_PER_S

    def on_shipped(self, work: Work, elapsed_s: float, compute_s: float) -> None:
        """Record a round trip; the creditor computed for `compute_s` of it."""
        moving_s = max(0.0, elapsed_s - compute_s)
        self.remote_pair_s = averaged(self.remote_pair_s, compute_s / max(1, work.pairs), _WEIGHT)
        overhead_s = max(1e-6, moving_s - work.ship_bytes / self.bytes_per_s)
        self.round_trip_s = averaged(self.round_trip_s, overhead_s, _WEIGHT)

    def on_fetched(self, fetched_bytes: int, elapsed_s: float) -> None:
        """Record a fetch that had the link to itself."""
        self.link.on_carried(fetched_bytes, elapsed_s - self.round_trip_s)

    def on_attended(self, pairs: int, elapsed_s: float) -> None:
        """Record attention computed here over fetched blocks."""
        self.own_pair_s = averaged(self.own_pair_s, elapsed_s / max(1, pairs), _WEIGHT)

    def on_layer(self, elapsed_s: float) -> None:
        """Record the time between two layers' attention."""
        self.hidden_s = averaged(self.hidden_s, elapsed_s, _WEIGHT)


def ship_s(work: Work, speeds: CreditorSpeeds) -> float:
    """Return a layer's wait when queries travel."""
    return speeds.round_trip_s + work.ship_bytes / speeds.bytes_per_s + work.pairs * speeds.remote_pair_s


def fetch_s(work: Work, speeds: CreditorSpeeds) -> float:
    """Return a layer's wait when blocks travel, fetched a layer ahead."""
    if not work.fetch_bytes:
        return work.pairs * speeds.own_pair_s
    moving_s = speeds.round_trip_s + work.fetch_bytes / speeds.bytes_per_s
    return max(0.0, moving_s - speeds.hidden_s) + work.pairs * speeds.own_pair_s


def choose_mode(work: Work, speeds: CreditorSpeeds) -> ShipMode:
    """Return the cheaper way; at equal cost, ship the queries."""
    return ShipMode.SHIP if ship_s(work, speeds) <= fetch_s(work, speeds) else ShipMode.FETCH
