"""Which of several ledgers starts settlements: of those that are heard, the one with the smallest id. Pure.

Every ledger announces itself and hears itself, too: one that does not is cut off from the bus, or was
stopped, and does not lead until it has listened for `silence_s` again; so the time passed in has to run on
while the process is stopped. While announcements are lost two may lead, or nobody: workers take part in one
settlement at a time, so the former wastes questions and the latter time.
"""

from shared.liveness import Liveness


class Leadership:
    """Whether this ledger starts settlements, by the announcements it has heard, its own among them."""

    def __init__(self, ledger_id: str, incarnation: int, *, silence_s: float) -> None:
        self._id = ledger_id
        self._incarnation = incarnation
        self._silence_s = silence_s
        self._ledgers = Liveness(silence_s)
        self._since_s: float | None = None
        """From then on it has heard itself without a gap."""

    def on_announced(self, ledger_id: str, incarnation: int, now_s: float) -> None:
        """A ledger is there, this one included. Of one id only the present start counts."""
        self._ledgers.silent(now_s)
        was_heard = self._hears_itself()
        is_present = self._ledgers.hear(ledger_id, incarnation, now_s)
        if is_present and self._hears_itself() and not was_heard:
            self._since_s = now_s

    def leads(self, now_s: float) -> bool:
        """Whether this one starts settlements now."""
        self._ledgers.silent(now_s)
        if self._since_s is None or not self._hears_itself():
            return False
        return now_s - self._since_s >= self._silence_s and min(self._ledgers) == self._id

    def heard(self, now_s: float) -> list[str]:
        """Ids of those that are there, in order."""
        self._ledgers.silent(now_s)
        return sorted(self._ledgers)

    def check_integrity(self) -> None:
        """Raises AssertionError when it has heard itself and does not know since when."""
        assert not self._hears_itself() or self._since_s is not None

    def _hears_itself(self) -> bool:
        """As of the last look."""
        return self._ledgers.present(self._id) == self._incarnation
