"""How much of its time a creditor computes for others. Pure.

Source: Infinite-LLM §4.6, "a threshold within each rManager which adjudicates the borrowing of computational
resources"; algorithms.md §4 (`max_remote_attention_fraction`).
"""


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
