"""How long to wait before a child is started again. It knows no process and no clock."""

from dataclasses import dataclass


@dataclass
class Backoff:
    """Doubles from `first_s` to `longest_s`; a child that lived for `stable_s` starts over."""

    first_s: float = 0.1
    longest_s: float = 10.0
    stable_s: float = 10.0
    failures: int = 0
    """Ends in a row, each within `stable_s` of its start."""

    def on_exit(self, lived_s: float) -> float:
        """Seconds to wait before the next start of a child that lived for `lived_s`."""
        if lived_s >= self.stable_s:
            self.failures = 0
        self.failures += 1
        return min(self.longest_s, self.first_s * 2.0 ** min(self.failures - 1, 30))
