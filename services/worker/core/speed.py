"""How fast this worker computes, from a profile and the steps it ran: exponentially weighted. Pure."""

from shared.average import averaged

WEIGHT = 0.1
"""Of the newest measurement."""
LEAST_PREFILL_TOKENS = 16
"""Steps with fewer prompt tokens say nothing about prefill speed."""


class SpeedMeter:
    """Prefill in tokens/s, a decode step in seconds; 0 before the first measurement of each.

    `prefill_tokens_per_s` is what a profile at the start found; 0: there was none.
    """

    def __init__(self, prefill_tokens_per_s: float = 0.0) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = 0.0

    def on_step(self, prefilled_tokens: int, decoded_tokens: int, step_s: float) -> float:
        """Seconds that the step's prompt tokens took; 0 where it says nothing about that."""
        if prefilled_tokens == 0 and decoded_tokens:
            self.decode_step_s = averaged(self.decode_step_s or None, step_s, WEIGHT)
        elif prefilled_tokens >= LEAST_PREFILL_TOKENS and step_s > 0:
            decoding_s = self.decode_step_s if decoded_tokens else 0.0
            prefill_s = max(step_s - decoding_s, 0.1 * step_s)
            measured = prefilled_tokens / prefill_s
            self.prefill_tokens_per_s = averaged(self.prefill_tokens_per_s or None, measured, WEIGHT)
            return prefill_s
        return 0.0
