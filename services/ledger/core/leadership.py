"""Which of several ledgers starts settlements: of those that are heard, the one with the smallest id. Pure.

Every ledger announces itself and hears itself, too: one that does not is cut off from the bus, or was
stopped, and does not lead until it has listened for `silence_s` again. While announcements are lost two may
lead, or nobody: workers take part in one settlement at a time, so the former wastes questions and the latter
time. It knows no bus and no clock; `now_s` is passed in.
"""

from shared.incarnations import Incarnations

Life = tuple[str, int]
"""A ledger's instance id and incarnation."""


class Leadership:
    """As one ledger sees it."""

    def __init__(self, ledger_id: str, incarnation: int, *, silence_s: float) -> None:
        self._own: Life = (ledger_id, incarnation)
        self._silence_s = silence_s
        self._heard_s: dict[Life, float] = {}
        self._incarnations = Incarnations()
        self._since_s: float | None = None
        """From then on it has heard itself without a gap."""

    def on_announced(self, ledger_id: str, incarnation: int, now_s: float) -> None:
        """A ledger is there, this one included. Of one id only the present start counts."""
        if not self._incarnations.hear(ledger_id, incarnation, now_s):
            return
        life = (ledger_id, incarnation)
        self._heard_s = {
            other: at_s for other, at_s in self._heard_s.items() if other[0] != ledger_id or other == life
        }
        if life == self._own and not self._is_heard(life, now_s):
            self._since_s = now_s
        self._heard_s[life] = now_s

    def leads(self, now_s: float) -> bool:
        """Whether this one starts settlements now."""
        self._forget(now_s)
        if self._since_s is None or not self._is_heard(self._own, now_s):
            return False
        has_listened = now_s - self._since_s >= self._silence_s
        return has_listened and min(self._heard_s) == self._own

    def heard(self, now_s: float) -> list[str]:
        """Ids of those that are there, in order."""
        self._forget(now_s)
        return sorted({ledger_id for ledger_id, _ in self._heard_s})

    def check_integrity(self) -> None:
        """Raises AssertionError when it has heard itself and does not know since when."""
        assert self._own not in self._heard_s or self._since_s is not None
        assert self._since_s is None or self._since_s <= self._heard_s.get(self._own, self._since_s)

    def _is_heard(self, life: Life, now_s: float) -> bool:
        return life in self._heard_s and now_s - self._heard_s[life] < self._silence_s

    def _forget(self, now_s: float) -> None:
        self._heard_s = {life: at_s for life, at_s in self._heard_s.items() if self._is_heard(life, now_s)}
