"""How fast an engine computes prompts, timed before it serves. Knows neither its load nor its neighbours."""

from services.worker.core.sampling import SamplePoint
from services.worker.engine.engine import Engine, Row
from shared.clock import Clock, monotonic_s
from shared.messages.sequence import Sampling

CHUNK_TOKENS = 128
"""Of one prompt, computed at once."""
LEAST_TOKENS = 16
"""Fewer say nothing."""
_ROUNDS = 3
"""The first sets up what this size needs, and does not count where another follows."""
_LONG_S = 1.0
"""After so long no other follows."""


def prefill_tokens_per_s(engine: Engine, blocks: int, clock: Clock = monotonic_s) -> float:
    """The fastest of some chunks through the first `blocks` blocks, which nobody may use yet; 0 where fewer
    than `LEAST_TOKENS` fit."""
    tokens = min(CHUNK_TOKENS, blocks * engine.block_tokens, engine.max_positions)
    if tokens < LEAST_TOKENS:
        return 0.0
    held = list(range(-(-tokens // engine.block_tokens)))
    point = SamplePoint(Sampling(seed=0, max_tokens=1, temperature=0.0), 0, 0)
    took_s = []
    for _ in range(_ROUNDS):
        began_s = clock()
        engine.step([Row([0] * tokens, 0, held, point)])
        took_s.append(clock() - began_s)
        if sum(took_s) >= _LONG_S:
            break
    fastest_s = min(took_s[1:] or took_s)
    return tokens / fastest_s if fastest_s > 0 else 0.0
