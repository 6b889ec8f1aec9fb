"""One machine's cores under all simulated workers: engines, and everything else that serves with them.

What a step costs holds on a core of its own. Of so many cores those that are at work at one moment share:
every engine that computes, and `lanes` threads of the rest (gateway, bus, workers' loops, client) while they
have something left to do. The rest's work is a queue in CPU seconds: each request, each step and each token
adds to it, and a token is with its client when what is before it is done. So who starts where a core is free
does not wait, and tokens that come together wait for each other. `ratios` are how much longer than they
should measured steps took, drawn anew for each step: pauses are in them.

Shares are looked up when a stretch of steps begins and hold to its end: some milliseconds. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True, slots=True)
class CoreCosts:
    """What is measured of a machine."""

    cores: int
    request_s: float
    token_s: float
    """CPU seconds of everything but the engines, of a request and of a token."""
    lanes: float = 1.0
    """Threads of it that are at work at once, in the mean, while there is work."""
    ratios: tuple[float, ...] = (1.0,)
    """Measured steps over what the cost model says of them."""
    frame_s: float = 0.0
    """The same of a step, however many tokens come of it: its report, its frames."""
    seed: int = 0


class SharedCores:
    """See above. One for all workers of a simulation."""

    def __init__(self, costs: CoreCosts, workers: int) -> None:
        self._costs = costs
        self._random = Random(f"{costs.seed}/steps")
        self._busy_until_s = [0.0] * workers
        self._left_s = 0.0
        """CPU seconds of the rest that are not done."""
        self._at_s = 0.0

    def ends_s(self, worker: int, durations_s: Sequence[float], now_s: float) -> list[float]:
        """When each of the steps that a worker begins now is over."""
        self._work(now_s)
        self._busy_until_s[worker] = float("inf")
        slowed = 1.0 / self._share(now_s)
        ratios = self._random.choices(self._costs.ratios, k=len(durations_s))
        took_s = [slowed * ratio * each for ratio, each in zip(ratios, durations_s, strict=True)]
        ends_s = list(accumulate(took_s, initial=now_s))[1:]
        self._busy_until_s[worker] = ends_s[-1]
        return ends_s

    def arrive(self, now_s: float) -> None:
        """A request, on its way to a worker."""
        self._work(now_s)
        self._left_s += self._costs.request_s

    def emit(self, ends_s: Sequence[float], tokens: int, now_s: float) -> float:
        """Steps ended with so many tokens each: how long after `now_s` the last of them are with clients."""
        for end_s in ends_s:
            self._work(end_s)
            self._left_s += self._costs.frame_s + tokens * self._costs.token_s
        self._work(now_s)
        return self._left_s / self._rest_rate(now_s)

    def _work(self, until_s: float) -> None:
        """What the rest got done."""
        if until_s > self._at_s:
            self._left_s = max(0.0, self._left_s - (until_s - self._at_s) * self._rest_rate(self._at_s))
            self._at_s = until_s

    def _rest_rate(self, now_s: float) -> float:
        """CPU seconds in one second while there is work."""
        engines = sum(until_s > now_s for until_s in self._busy_until_s)
        lanes = self._costs.lanes
        return lanes * min(1.0, self._costs.cores / (engines + lanes))

    def _share(self, now_s: float) -> float:
        """Of a core, for each engine that is at work."""
        engines = sum(until_s > now_s for until_s in self._busy_until_s)
        wanted = engines + (self._costs.lanes if self._left_s > 0.0 else 0.0)
        return min(1.0, self._costs.cores / wanted)
