"""How fast blocks come from each other worker: measured by transfers, exponentially weighted. Pure."""

WEIGHT = 0.3
"""Of the newest measurement."""


class LinkRates:
    """Bytes a second, by the worker they came from."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_transfer(self, worker_id: str, size_bytes: int, took_s: float) -> None:
        """So much arrived in that time, questions and waits included."""
        if size_bytes > 0 and took_s > 0:
            now = size_bytes / took_s
            old = self._rates.get(worker_id, now)
            self._rates[worker_id] = old + WEIGHT * (now - old)

    def forget(self, worker_id: str) -> None:
        """That worker is another now."""
        self._rates.pop(worker_id, None)

    def knows(self, worker_id: str) -> bool:
        return worker_id in self._rates

    def bytes_per_s(self) -> dict[str, float]:
        """A copy."""
        return dict(self._rates)
