"""Which gateways still listen. Pure: told what was heard, asked who fell silent.

Silence is counted in time awake: a worker that was itself stopped for a while has not listened either.
"""

from shared.incarnations import Incarnations

LONGEST_NAP_S = 1.0
"""Between two ticks at most this much counts as time in which a gateway could have been heard."""


class GatewayWatch:
    """Last sign of life and present incarnation of each gateway that has sequences here or reports itself."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awake_s = 0.0
        self._ticked_s: float | None = None
        self._heard: dict[str, float] = {}
        self._incarnations = Incarnations()

    def tick(self, now_s: float) -> list[str]:
        """Advance the clock. Returns the gateways that fell silent, each once until it is heard again."""
        if self._ticked_s is not None:
            self._awake_s += min(now_s - self._ticked_s, LONGEST_NAP_S)
        self._ticked_s = now_s
        silent = [name for name, at_s in self._heard.items() if self._awake_s - at_s > self._timeout_s]
        for name in silent:
            del self._heard[name]
        return silent

    def hear(self, gateway_id: str, incarnation: int) -> bool:
        """It reports itself. False when a later start of it is heard of."""
        if not self._incarnations.hear(gateway_id, incarnation, self._awake_s):
            return False
        self._heard[gateway_id] = self._awake_s
        return True

    def expect(self, gateway_id: str, incarnation: int) -> bool:
        """Somebody says that it waits for a sequence: a sign of life, unless another start of it is there."""
        if self._incarnations.is_another(gateway_id, incarnation, self._awake_s):
            return False
        self._heard[gateway_id] = self._awake_s
        return True
