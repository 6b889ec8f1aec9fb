"""Decides how many workers should run: fewer if some stay idle, one more if arrivals find none.

It only publishes the target; `services/stack/scaling.py` or an orchestrator starts and stops workers. A
worker is parked, so that it gets no work, before it may be stopped. Pure. Source: papers/000 §VI
("terminate", "activate"); `algorithms.md` §3.
"""

from collections.abc import Iterable


class Scaling:
    """Decides each epoch how many workers should run (`wanted`) and which are parked (`parked`)."""

    def __init__(
        self, *, least: int = 1, most: int = 0, linger_s: float = 30.0, start_s: float = 30.0
    ) -> None:
        """`most` 0: as many as there are. A worker idle for `linger_s` is parked. Another start is requested
        `start_s` after one that did not come."""
        self._least, self._most, self._linger_s, self._start_s = least, most, linger_s, start_s
        self.wanted = 0
        self.parked: set[str] = set()
        self._idle_since_s: dict[str, float] = {}
        self._starting_until_s: float | None = None

    def on_epoch(
        self, running: Iterable[str], idle: Iterable[str], wanting: int, now_s: float
    ) -> tuple[list[str], list[str]]:
        """Return the workers to park now, and parked ones to use again because sequences wait. `running`: all
        known workers; `idle`: unparked ones without sequences; `wanting`: sequences without a worker."""
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
        """Use a parked worker again if one still runs, else request a start; one at a time."""
        wanted = self._within(len(used) + 1)
        if self.parked and wanted > len(used):
            name = min(self.parked)
            self.parked.discard(name)
            self.wanted = wanted
            return [name]
        if self._starting_until_s is None and wanted > len(used):
            self.wanted, self._starting_until_s = wanted, now_s + self._start_s
        return []

    def _fewer(self, used: set[str], now_s: float) -> list[str]:
        """Park workers idle for `linger_s`, last by name first, down to the minimum."""
        idle = self._idle_since_s
        ripe = [name for name, since_s in idle.items() if now_s - since_s >= self._linger_s]
        chosen = sorted(ripe, reverse=True)[: max(0, len(used) - max(1, self._least))]
        self.parked.update(chosen)
        for name in chosen:
            del idle[name]
        if chosen:
            self.wanted = self._within(len(used) - len(chosen))
        return chosen

    def _within(self, count: int) -> int:
        most = self._most or count
        return max(self._least, min(count, most))

    def check_integrity(self) -> None:
        assert not self.parked & self._idle_since_s.keys()
        assert self.wanted >= 0
