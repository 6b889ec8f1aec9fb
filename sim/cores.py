"""CPU cores of one machine, shared by all simulated workers and the rest of the server.

A step's cost assumes a core of its own. Cores are shared by every engine that computes and, while they have
work, by `lanes` threads of the rest (gateway, bus, worker loops, client). The rest is one queue of CPU
seconds: each request, step and token adds to it. A token reaches its client when the queue before it is
empty.

Each step is also slowed by a random draw from `ratios`, the measured step times over the modelled ones;
pauses are included. Shares are fixed when a stretch begins, for some milliseconds. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True, slots=True)
class CoreCosts:
    """Costs measured on a machine."""

    cores: int
    request_s: float
    token_s: float
    """CPU seconds per request and per token outside the engines."""
    lanes: float = 1.0
    """Mean number of threads outside the engines that run at once while there is work."""
    ratios: tuple[float, ...] = (1.0,)
    """Measured step times divided by those of the cost model."""
    frame_s: float = 0.0
    """CPU seconds outside the engines per step, whatever its number of tokens."""
    seed: int = 0


class SharedCores:
    """The shared cores of all workers of one simulation."""

    def __init__(self, costs: CoreCosts, workers: int) -> None:
        self._costs = costs
        self._random = Random(f"{costs.seed}/steps")
        self._busy_until_s = [0.0] * workers
        self._left_s = 0.0
        """CPU seconds of queued work outside the engines."""
        self._at_s = 0.0

    def ends_s(self, worker: int, durations_s: Sequence[float], now_s: float) -> list[float]:
        """Return the end time of each step that a worker begins now."""
        self._work(now_s)
        self._busy_until_s[worker] = float("inf")
        slowed = 1.0 / self._share(now_s)
        ratios = self._random.choices(self._costs.ratios, k=len(durations_s))
        took_s = [slowed * ratio * each for ratio, each in zip(ratios, durations_s, strict=True)]
        ends_s = list(accumulate(took_s, initial=now_s))[1:]
        self._busy_until_s[worker] = ends_s[-1]
        return ends_s

    def arrive(self, now_s: float) -> None:
        """Add the work of one arriving request."""
        self._work(now_s)
        self._left_s += self._costs.request_s

    def emit(self, ends_s: Sequence[float], tokens: int, now_s: float) -> float:
        """Add the work of steps with `tokens` tokens each; return the delay until clients have the last
        ones."""
        for end_s in ends_s:
            self._work(end_s)
            self._left_s += self._costs.frame_s + tokens * self._costs.token_s
        self._work(now_s)
        return self._left_s / self._rest_rate(now_s)

    def _work(self, until_s: float) -> None:
        """Advance the work outside the engines to `until_s`."""
        if until_s > self._at_s:
            self._left_s = max(0.0, self._left_s - (until_s - self._at_s) * self._rest_rate(self._at_s))
            self._at_s = until_s

    def _rest_rate(self, now_s: float) -> float:
        """Return the CPU seconds per second of the work outside the engines."""
        engines = sum(until_s > now_s for until_s in self._busy_until_s)
        lanes = self._costs.lanes
        return lanes * min(1.0, self._costs.cores / (engines + lanes))

    def _share(self, now_s: float) -> float:
        """Return the share of a core that each running engine gets."""
        engines = sum(until_s > now_s for until_s in self._busy_until_s)
        wanted = engines + (self._costs.lanes if self._left_s > 0.0 else 0.0)
        return min(1.0, self._costs.cores / wanted)
