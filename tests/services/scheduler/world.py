"""A small world in which messages and steps are even: for single cases of the scheduler's core."""

from dataclasses import replace
from typing import Any

from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicySettings
from tests.stack.actors import Request
from tests.stack.world import EVEN, World

SMALL = Rules(settings=PolicySettings(token_budget=64, max_batch_sequences=8), round_s=0.3)
UNMEASURED = {"prefill_tokens_per_s": 0.0, "decode_step_s": 0.0}


def small_world(
    seed: int = 0, *, workers: int = 2, kv_blocks: int = 64, step_s: float = 0.01, **kinds: Any
) -> World:
    """Blocks of four tokens; workers that have not measured how fast they are."""
    return World(
        seed,
        workers=workers,
        kv_blocks=kv_blocks,
        pace=replace(EVEN, steps_s=(step_s,)),
        **{"rules": SMALL, "block_tokens": 4, "says": UNMEASURED, **kinds},
    )


def started(tokens: int = 5, answer_tokens: int = 60, **kinds: Any) -> tuple[World, Request]:
    """One worker, and a request that has so many tokens of its answer."""
    world = small_world(workers=1, **kinds)
    request = world.ask_for("a", 4, answer_tokens, answer_tokens)
    world.until(lambda: len(request.tokens) >= tokens, limit_s=5.0)
    return world, request
