"""The live half of `bench fleet --routes --live`: expected against actual cache hits.

A real stack with workers that take a model's time. Prompts start with one of a few prefixes of unequal
popularity.
"""

import asyncio
import random
from pathlib import Path

from bench.kit.load import Answer, Target, complete
from bench.kit.stacks import start_stack

WORKERS = 4
_BEGINNINGS, _BEGINNING_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 40, 512, 64, 24
_VOCABULARY = range(300, 2000)
_ROOMY_BLOCKS, _TIGHT_BLOCKS = 960, 192
"""Blocks of 16 tokens per worker: room for all prefixes in every cache, or for half of them."""
_DEADLINE_S = 120.0
_CALM_S = 1.0


def measure(
    run_dir: Path, policy: str, *, requests: int, rate: float, seed: int, is_tight: bool = False
) -> dict[str, float]:
    """Measure one placement policy on a new stack. With `is_tight`, blocks are evicted all the time."""
    settings: dict[str, object] = {
        "worker.engine": "simulated",
        "worker.kv_blocks": _TIGHT_BLOCKS if is_tight else _ROOMY_BLOCKS,
        "placement.policy": policy,
    }
    if is_tight:
        settings["worker.prefix_cache.host_blocks"] = 1
    with start_stack(run_dir, settings, workers=WORKERS, name="kvasir") as stack:
        answers = asyncio.run(_ask_all(stack.target, requests, rate, seed))
        told = stack.details("hits_expected_tokens")
    tokens = sum(answer.prompt_tokens for answer in answers)
    first_s = sorted(answer.first_s for answer in answers if answer.ok)
    return {
        "hit_share": sum(answer.cached_tokens for answer in answers) / tokens,
        "hit_error": told["hits_error_tokens"] / max(1, told["placed_prompt_tokens"]),
        "ttft_p50_s": first_s[len(first_s) // 2],
        "ttft_p99_s": first_s[int(0.99 * len(first_s))],
        "failures": float(sum(not answer.ok for answer in answers)),
    }


async def _ask_all(target: Target, requests: int, rate: float, seed: int) -> list[Answer]:
    drawn = random.Random(f"{seed}/routes")
    tasks: list[asyncio.Task[Answer]] = []
    loop = asyncio.get_running_loop()
    began_s, at_s = loop.time(), 0.0
    for number in range(requests):
        at_s += drawn.expovariate(rate)
        family = min(int(drawn.paretovariate(0.8)), _BEGINNINGS)
        prompt = _tokens(f"beginning {family}", _BEGINNING_TOKENS) + _tokens(f"{seed}/{number}", _OWN_TOKENS)
        body = {"prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
        tasks.append(asyncio.create_task(complete(target, body, _DEADLINE_S)))
    answers = list(await asyncio.gather(*tasks))
    await asyncio.sleep(_CALM_S)
    return answers


def _tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(_VOCABULARY, k=count)
