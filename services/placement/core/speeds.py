"""Estimates worker speeds from their measurements, by linear regression on the preceding tokens. Pure.

A worker at the end of a prompt of 100,000 tokens measures a sixth of its speed for the next short prompt. So
speed is defined for tokens without predecessors, and preceding tokens are counted as extra *plain* tokens. A
plain token costs as much as one without predecessors.
"""

from dataclasses import dataclass, field

_FITTED, _PROMPTS_FITTED, _OWN_FITTED = 0.97, 0.995, 0.95
"""Decay per measurement: of decode steps, of prompt tokens at all workers, and at one worker."""
_LEAST_SPREAD = 0.5
"""Minimum relative spread of contexts in the fit of prompt tokens: below it, noise looks like a slope."""
LEAST_ALONE = 0.1
"""Minimum share of a prompt token's time that is not attributed to the tokens before it."""
_MOST_WORKERS = 4096


@dataclass(slots=True)
class LineFit:
    """Least-squares line: time without context, and time per token of context. Each measurement counts
    `fades` as much as the next one."""

    fades: float = _FITTED
    least_spread: float = 0.02
    """Minimum standard deviation of contexts, relative to their mean, for a slope."""
    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    """Faded sums of measurements, contexts and times."""
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, context_tokens: float, took_s: float) -> None:
        x, y, fades = context_tokens, took_s, self.fades
        self.n, self.x, self.y = self.n * fades + 1, self.x * fades + x, self.y * fades + y
        self._xx, self._xy = self._xx * fades + x * x, self._xy * fades + x * y

    def read(self) -> tuple[float, float] | None:
        """Return seconds, and seconds per token of context; None without measurements."""
        if self.n < 1.0:
            return None
        mean_x, mean_y = self.x / self.n, self.y / self.n
        variance = self._xx / self.n - mean_x**2
        slope = 0.0
        if variance > (self.least_spread * mean_x) ** 2 and variance > 0:
            slope = (self._xy / self.n - mean_x * mean_y) / variance
        slope = min(max(0.0, slope), 0.9 * mean_y / mean_x if mean_x > 0 else 0.0)
        return mean_y - slope * mean_x, slope


@dataclass(slots=True)
class PromptSpeeds:
    """Time that each preceding token adds to a prompt token, taken to be the same for all workers."""

    preceding_token_s: float = 0.0
    _fit: LineFit = field(default_factory=lambda: LineFit(_PROMPTS_FITTED, _LEAST_SPREAD))
    _of: dict[str, LineFit] = field(default_factory=dict)
    _latest: dict[str, tuple[float, float]] = field(default_factory=dict)

    def on_measured(self, worker_id: str, tokens_per_s: float, context_tokens: float) -> None:
        """Record a prefill speed and its mean number of preceding tokens. A repeated report is ignored."""
        found = (tokens_per_s, context_tokens)
        if tokens_per_s <= 0 or self._latest.get(worker_id) == found:
            return
        if len(self._latest) >= _MOST_WORKERS:
            self._latest.clear()
            self._of.clear()
        self._latest[worker_id] = found
        own = self._of.setdefault(worker_id, LineFit(_OWN_FITTED))
        own.add(context_tokens, 1.0 / tokens_per_s)
        self._fit.add(context_tokens, 1.0 / tokens_per_s)
        fit = self._fit.read()
        self.preceding_token_s = 0.0 if fit is None else fit[1]

    def forget(self, worker_id: str) -> None:
        """Drop the measurements of a lost worker."""
        self._of.pop(worker_id, None)
        self._latest.pop(worker_id, None)

    def without(self, each_s: float, context_tokens: float) -> float:
        """Return the time of a prompt token without the share of its `context_tokens` predecessors."""
        return max(LEAST_ALONE * each_s, each_s - self.preceding_token_s * context_tokens)

    def sums(self, worker_id: str) -> tuple[float, float, float]:
        """Return a worker's faded sums: measurements, their contexts, their seconds per token."""
        own = self._of.get(worker_id)
        return (0.0, 0.0, 0.0) if own is None else (own.n, own.x, own.y)

    def alone(self, worker_id: str) -> float:
        """Return a worker's plain prompt tokens per second; 0 without measurements."""
        own = self._of.get(worker_id)
        if own is None:
            return 0.0
        before_s = self.preceding_token_s * own.x
        return own.n / max(LEAST_ALONE * own.y, own.y - before_s)


def plain_tokens(first: int, end: int, preceding_share: float) -> float:
    """Return the cost of tokens [first, end) of a prompt, in plain tokens. `preceding_share`: cost added by
    each preceding token, as a share of a plain token's."""
    return (end - first) * (1.0 + preceding_share * (first + end) / 2)
