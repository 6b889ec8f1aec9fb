"""How many workers should run: fewer when some have long served nothing, one more when arrivals found none.

Says what is wanted, again and again; whoever runs workers (`services/stack/scaling.py`, or an orchestrator)
makes it so, or does not. A worker is parked, which means it gets nothing more, before anybody may stop it.
Pure.
Source: papers/000 §VI ("terminate", "activate"); `algorithms.md` §3.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Between which numbers workers are scaled, and how fast. `most` 0: as many as there are."""

    least: int = 1
    most: int = 0
    spare: int = 0
    """Idle workers that stay, so that the next arrival need not wait for a start."""
    linger_s: float = 30.0
    """So long a worker must have served nothing."""
    start_s: float = 30.0
    """So long one start is waited for before another is asked for."""


class Scaling:
    """Decides from epoch to epoch how many workers should run (`wanted`) and which need not (`parked`)."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self.wanted = 0
        self.parked: set[str] = set()
        self.stopped = 0
        self.started = 0
        self._idle_since_s: dict[str, float] = {}
        self._starting_until_s: float | None = None

    def on_epoch(
        self, running: Iterable[str], idle: Iterable[str], wanting: int, now_s: float
    ) -> tuple[list[str], list[str]]:
        """Which workers to park now, and which parked ones to take back because somebody waits.

        `running`: all that are heard of; `idle`: of those not parked, the ones that serve nothing; `wanting`:
        sequences that find no worker.
        """
        heard = set(running)
        self.parked &= heard
        used = heard - self.parked
        still = set(idle) & used
        self.wanted = self.wanted or self._within(len(used))
        self._idle_since_s = {name: self._idle_since_s.get(name, now_s) for name in still}
        if self._starting_until_s is not None and (
            now_s >= self._starting_until_s or len(used) >= self.wanted
        ):
            self._starting_until_s = None
        if wanting:
            return [], self._more(used, now_s)
        if self._starting_until_s is None:
            self.wanted = self._within(len(used))
        return self._fewer(used, now_s), []

    def _more(self, used: set[str], now_s: float) -> list[str]:
        """One that is parked and still runs, else one that has to be started; one at a time."""
        if self.parked and self._within(len(used) + 1) > len(used):
            name = min(self.parked)
            self.parked.discard(name)
            self.wanted = self._within(len(used) + 1)
            return [name]
        wanted = self._within(len(used) + 1)
        if self._starting_until_s is None and wanted > len(used):
            self.wanted, self._starting_until_s = wanted, now_s + self.rules.start_s
            self.started += 1
        return []

    def _fewer(self, used: set[str], now_s: float) -> list[str]:
        """Those idle for long, the last by name first, down to the least and the spare ones."""
        rules = self.rules
        ripe = [name for name, since_s in self._idle_since_s.items() if now_s - since_s >= rules.linger_s]
        dispensable = min(len(self._idle_since_s) - rules.spare, len(used) - max(1, rules.least))
        chosen = sorted(ripe, reverse=True)[: max(0, dispensable)]
        self.parked.update(chosen)
        self.stopped += len(chosen)
        for name in chosen:
            del self._idle_since_s[name]
        if chosen:
            self.wanted = self._within(len(used) - len(chosen))
        return chosen

    def _within(self, count: int) -> int:
        most = self.rules.most or count
        return max(self.rules.least, min(count, most))

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert not self.parked & self._idle_since_s.keys()
        assert self.wanted >= 0
