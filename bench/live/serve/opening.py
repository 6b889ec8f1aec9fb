"""Preparation of the serve bench: start sides, serve lessons, train the predictor, find true lengths.

Our side with policy `vllm` comes first: its answers train `kvasir`'s predictor and give `oracle` the lengths.
A resumed run reads the lengths back.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.peers import FASTEST, VLLM_BLOCK_TOKENS, VLLM_VARIANTS, start_vllm, vllm_serve
from bench.kit.stacks import Server, start_all
from bench.live.serve.arena import Arena, Workload, true_lengths
from bench.live.serve.plan import Plan
from bench.live.serve.sides import (
    BASE,
    MAX_SEQUENCES,
    MECHANISMS,
    ORACLE,
    OURS,
    PEER,
    Policy,
    Shape,
    start_ours,
    train_regressor,
)
from services.predictor.core.length_model import LengthSample
from services.predictor.samples import write_samples
from shared.messages.sequence import pack_tokens

_LESSONS, _TRUTHS, _VERSIONS, _LENGTHS = "lessons.jsonl", "truths.jsonl", "regressor", "lengths.json"
_WARM_UP = 32
"""Lessons used to warm up the other sides."""


def open_arena(context: Context, plan: Plan, arena: Arena, running: ExitStack) -> Workload:
    """Admit all sides of the plan to the arena; `running` ends them.

    Raises ConfigError if the peer is not installed, InternalError if a side does not start or answer.
    """
    folder = context.run_dir.resolve()
    variant = VLLM_VARIANTS[FASTEST] if plan.engines or PEER in plan.sides else None
    core, ours = arena.cores.engine, variant if plan.engines else None
    shape = Shape(plan.model, plan.kv_tokens, plan.context_tokens, core, folder, plan.workers, ours)
    starts = [partial(start_ours, shape, Policy(BASE, "vllm", "constant"))]
    if variant is not None:
        vllm_serve("cpu")
    if variant is not None and PEER in plan.sides:
        sizes: dict[str, Any] = {"engine_core": core, "context_tokens": plan.context_tokens}
        sizes |= {"max_sequences": MAX_SEQUENCES, "kv_blocks": plan.kv_tokens // VLLM_BLOCK_TOKENS + 1}
        starts.append(partial(start_vllm, folder, plan.model, variant, **sizes))  # it keeps block 0
    context.say(f"KV of {plan.kv_tokens} tokens; starting {', '.join(plan.sides)}")
    first = start_all(starts, running)
    warm_up = plan.prompts.lessons[:_WARM_UP]
    base = next(served for served in first if served.name == BASE)
    lengths = _lengths(context, plan, arena, base)
    for served in first:
        if served is not base:
            arena.admit(served, warm_up, plan.max_tokens)
    knowledge = _knowledge(context, plan, lengths, folder)
    starts = [partial(start_ours, shape, Policy(OURS, "kvasir", plan.predictor, knowledge))]
    if ORACLE in plan.sides:
        starts.append(partial(start_ours, shape, Policy(ORACLE, "kvasir", "oracle", folder / _TRUTHS)))
    for name in plan.mechanisms:
        side = Policy(name, "kvasir", plan.predictor, knowledge, MECHANISMS[name])
        starts.append(partial(start_ours, shape, side))
    for served in start_all(starts, running):
        arena.admit(served, warm_up, plan.max_tokens)
    truths = lengths[len(plan.prompts.lessons) :]
    return Workload(plan.prompts.measured, truths, plan.max_tokens)


def _lengths(context: Context, plan: Plan, arena: Arena, base: Server) -> list[int]:
    """Return the lengths of the greedy answers to all lessons, then to all measured prompts."""
    file = context.run_dir / _LENGTHS
    if file.exists():
        arena.admit(base, plan.prompts.lessons[:_WARM_UP], plan.max_tokens)
        known: list[int] = json.loads(file.read_text())
        return known
    answered = arena.admit(base, plan.prompts.lessons, plan.max_tokens)
    context.say(f"{BASE}: true lengths of {len(plan.prompts.measured)} answers")
    base.tree.resume()
    try:
        truths = true_lengths(base.target, plan.prompts.measured, plan.max_tokens)
    finally:
        base.tree.pause()
    lengths = [one.completion_tokens for one in answered] + truths
    file.write_text(json.dumps(lengths))
    return lengths


def _knowledge(context: Context, plan: Plan, lengths: Sequence[int], folder: Path) -> Path | None:
    """Write the oracle's lengths, train the regressor on the lessons, and return its path."""
    lessons, measured = plan.prompts.lessons, plan.prompts.measured
    taught, truths = lengths[: len(lessons)], lengths[len(lessons) :]
    write_samples(folder / _LESSONS, _samples(lessons, taught, plan.max_tokens))
    # the oracle also knows answers cut at max_tokens, so none counts as censored
    write_samples(folder / _TRUTHS, _samples(measured, truths, plan.max_tokens + 1))
    if plan.predictor != "regressor":
        return None
    if not (folder / _VERSIONS).exists():
        context.say(f"training the regressor on {len(lessons)} answers")
        context.say(train_regressor(folder / _LESSONS, folder / _VERSIONS))
    return folder / _VERSIONS


def _samples(prompts: Sequence[Sequence[int]], lengths: Sequence[int], limit: int) -> list[LengthSample]:
    return [
        LengthSample(pack_tokens(list(prompt)), length, censored=length >= limit)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
