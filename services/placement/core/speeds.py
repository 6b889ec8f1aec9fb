"""How fast workers are, from what they measure: a line through what steps took, and what attention to the
tokens before adds to one of a prompt. Pure.

A worker that has just computed the end of a prompt of 100,000 tokens measures a sixth of the speed that it
has for the next short one. So its speed is taken for tokens that nothing precedes, and what precedes is
counted: in *plain* tokens, each as dear as one that nothing precedes.
"""

from dataclasses import dataclass, field

_FITTED, _PROMPTS_FITTED, _OWN_FITTED = 0.97, 0.995, 0.95
"""What a measurement of decoding steps, of prompts' tokens at all workers, or of those at one, counts for
after the next one."""
_LEAST_SPREAD = 0.5
"""Of what precedes prompt tokens: where prompts are much alike, other differences would be laid to it."""
_LEAST_ALONE = 0.1
"""Of what a prompt token was measured to take, that is not laid to those before it, at the least."""
_MOST_WORKERS = 4096


@dataclass(slots=True)
class LineFit:
    """What something takes without any tokens of context, and what each of these adds: least squares over
    what workers measured, each counting for `fades` as much as the next."""

    fades: float = _FITTED
    least_spread: float = 0.02
    """Standard deviation of contexts over their mean, below which they tell nothing."""
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, context_tokens: float, took_s: float) -> None:
        x, y, fades = context_tokens, took_s, self.fades
        self._n, self._x, self._y = self._n * fades + 1, self._x * fades + x, self._y * fades + y
        self._xx, self._xy = self._xx * fades + x * x, self._xy * fades + x * y

    def at_none(self, slope: float) -> float:
        """What it took, less so much for each token of context. Raises ZeroDivisionError before the first
        measurement."""
        return (self._y - slope * self._x) / self._n

    @property
    def mean(self) -> float:
        """What it took, on average. Raises ZeroDivisionError before the first measurement."""
        return self._y / self._n

    def read(self) -> tuple[float, float] | None:
        """Seconds, and seconds per token of context; None: nothing was measured."""
        if self._n < 1.0:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x**2
        slope = 0.0
        if variance > (self.least_spread * mean_x) ** 2 and variance > 0:
            slope = (self._xy / self._n - mean_x * mean_y) / variance
        slope = min(max(0.0, slope), 0.9 * mean_y / mean_x if mean_x > 0 else 0.0)
        return mean_y - slope * mean_x, slope


@dataclass(slots=True)
class PromptSpeeds:
    """What each token before it adds to a prompt token. Workers are taken to be alike in that."""

    preceding_token_s: float = 0.0
    _fit: LineFit = field(default_factory=lambda: LineFit(_PROMPTS_FITTED, _LEAST_SPREAD))
    _of: dict[str, LineFit] = field(default_factory=dict)
    _latest: dict[str, tuple[float, float]] = field(default_factory=dict)

    def on_measured(self, worker_id: str, tokens_per_s: float, context_tokens: float) -> None:
        """So many prompt tokens a second, each of them preceded by so many on average. The same again says
        nothing."""
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
        """It is gone."""
        self._of.pop(worker_id, None)
        self._latest.pop(worker_id, None)

    def without(self, each_s: float, context_tokens: float) -> float:
        """Of what a prompt token takes after so many, what it would take after none."""
        return max(_LEAST_ALONE * each_s, each_s - self.preceding_token_s * context_tokens)

    def alone(self, worker_id: str) -> float:
        """Prompt tokens a second at that worker where nothing precedes them; 0: it has measured nothing."""
        own = self._of.get(worker_id)
        if own is None:
            return 0.0
        return 1.0 / max(_LEAST_ALONE * own.mean, own.at_none(self.preceding_token_s))


def plain_tokens(first: int, end: int, preceding_share: float) -> float:
    """The tokens [first, end) of a prompt as so many that nothing precedes; `preceding_share`: what each one
    before adds, as a share of what such a token costs."""
    return (end - first) * (1.0 + preceding_share * (first + end) / 2)
