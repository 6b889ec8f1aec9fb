"""Whether queries go to the keys or keys to the queries: what each would take, by measured speeds. Pure.

Shipping moves rows · heads numbers and uses the creditor's time; fetching moves keys, uses our time, and
hides a good part of the way behind the layer before. So single tokens ship, and long chunks over short
contexts fetch. Source: Infinite-LLM §6.5, figure 12 (papers/001), with speeds measured while it runs.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.worker.peers.core.neighbours import LinkRate
from shared.average import averaged

_WEIGHT = 0.2
"""Of the newest measurement."""
_GUESSED_BYTES_PER_S = 1e9


class ComputeBudget:
    """`fraction` of every second, saved up to `burst_s` of computing; more of an idle worker's."""

    def __init__(self, fraction: float, burst_s: float = 0.1) -> None:
        if not 0 <= fraction <= 1 or burst_s <= 0:
            raise ValueError(f"no share of time: {fraction}, saved up to {burst_s} s")
        self._fraction = fraction
        self._burst_s = burst_s
        self._saved_s = burst_s
        self._at_s: float | None = None
        self.lent_s = 0.0
        """Computed for others since the start."""
        self.refusals = 0

    def may_compute(self, now_s: float, *, is_busy: bool) -> bool:
        """Whether a question may be computed here; `is_busy`: the worker has steps of its own to run."""
        if self._at_s is not None:
            earned_s = max(0.0, now_s - self._at_s) * self._fraction
            self._saved_s = min(self._burst_s, self._saved_s + earned_s)
        self._at_s = now_s
        allowed = self._fraction > 0 and (not is_busy or self._saved_s > 0)
        self.refusals += not allowed
        return allowed

    def on_computed(self, compute_s: float, *, is_busy: bool) -> None:
        """It took so long. What is computed in idle time costs nothing."""
        self.lent_s += compute_s
        if is_busy:
            self._saved_s -= compute_s

    def check_integrity(self) -> None:
        """AssertionError when more was saved than may be."""
        assert self._saved_s <= self._burst_s


class ShipMode(StrEnum):
    """What travels for a creditor's part of a step: queries there, or blocks here."""

    SHIP = "ship"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True)
class Work:
    """One holder's part of a step, for one layer."""

    ship_bytes: int
    """Queries there; outputs and log-sum-exps back."""
    fetch_bytes: int
    """Keys and values of the context."""
    pairs: int
    """Of a query head and a key it sees."""


class CreditorSpeeds:
    """Of one creditor: each a moving average of what was measured, from a first guess. What its link carries
    is read from, and added to, the worker's one table of rates."""

    def __init__(
        self,
        link: LinkRate | None = None,
        *,
        round_trip_s: float = 2e-4,
        remote_pair_s: float = 5e-9,
        own_pair_s: float = 5e-9,
    ) -> None:
        self.link = link or LinkRate()
        self.round_trip_s = round_trip_s
        self.remote_pair_s = remote_pair_s
        self.own_pair_s = own_pair_s
        self.hidden_s = 0.0
        """Of a layer's time that runs while the next layer's blocks are on their way."""

    @property
    def bytes_per_s(self) -> float:
        """Of the link, in both directions; a guess before it was measured."""
        return self.link.bytes_per_s or _GUESSED_BYTES_PER_S

    def on_shipped(self, work: Work, elapsed_s: float, compute_s: float) -> None:
        """From sending to the answer; `compute_s` of it at the creditor."""
        moving_s = max(0.0, elapsed_s - compute_s)
        self.remote_pair_s = averaged(self.remote_pair_s, compute_s / max(1, work.pairs), _WEIGHT)
        overhead_s = max(1e-6, moving_s - work.ship_bytes / self.bytes_per_s)
        self.round_trip_s = averaged(self.round_trip_s, overhead_s, _WEIGHT)

    def on_fetched(self, fetched_bytes: int, elapsed_s: float) -> None:
        """From asking to the last byte, with nothing else done meanwhile."""
        self.link.on_carried(fetched_bytes, elapsed_s - self.round_trip_s)

    def on_attended(self, pairs: int, elapsed_s: float) -> None:
        """Attention computed here, over fetched blocks."""
        self.own_pair_s = averaged(self.own_pair_s, elapsed_s / max(1, pairs), _WEIGHT)

    def on_layer(self, elapsed_s: float) -> None:
        """Between two layers' attention."""
        self.hidden_s = averaged(self.hidden_s, elapsed_s, _WEIGHT)


def ship_s(work: Work, speeds: CreditorSpeeds) -> float:
    """A layer's wait when queries are shipped."""
    return speeds.round_trip_s + work.ship_bytes / speeds.bytes_per_s + work.pairs * speeds.remote_pair_s


def fetch_s(work: Work, speeds: CreditorSpeeds) -> float:
    """A layer's wait when blocks are fetched, asked for a layer ahead, and attended to here."""
    if not work.fetch_bytes:
        return work.pairs * speeds.own_pair_s
    moving_s = speeds.round_trip_s + work.fetch_bytes / speeds.bytes_per_s
    return max(0.0, moving_s - speeds.hidden_s) + work.pairs * speeds.own_pair_s


def choose_mode(work: Work, speeds: CreditorSpeeds) -> ShipMode:
    """The cheaper one; at equal cost the queries travel."""
    return ShipMode.SHIP if ship_s(work, speeds) <= fetch_s(work, speeds) else ShipMode.FETCH
