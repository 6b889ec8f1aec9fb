"""The live half of `bench tenants`: a real stack with workers that take a model's time.

Two tenants request short answers to prompts that share a few prefixes. A third sends 100 times as many long
prompts with unique prefixes, which do not fit into the cache. The two send the same requests with and without
it.
"""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.load import Answer, Target, complete
from bench.kit.stacks import start_stack
from bench.simulated.tenants.simulation import FLOOD_RATE, FLOODER, OTHERS

WORKERS = 2
KV_BLOCKS = 960
_BEGINNING_TOKENS, _BEGINNINGS = 256, 6
_ASKED_TOKENS, _ANSWER_TOKENS = 32, 48
_FLOOD_TOKENS = 1500
_DEADLINE_S = 120.0
_VOCABULARY = range(300, 2000)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the two tenants."""

    rate: float
    """Requests per second of each tenant."""
    duration_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answers with and without the flood, and the stack's status."""

    alone: Sequence[Answer]
    flooded: Sequence[Answer]
    flood: Sequence[Answer]
    status: dict[str, Any]


def key_of(name: str) -> str:
    """Return the API key of a tenant."""
    return f"sk-bench-{name}"


def settings() -> dict[str, object]:
    """Return the settings of the stack."""
    hashes = {name: hashlib.sha256(key_of(name).encode()).hexdigest() for name in (*OTHERS, FLOODER)}
    return {
        "worker.engine": "simulated",
        "worker.kv_blocks": KV_BLOCKS,
        "worker.prefix_cache.host_mb": 1,
        "gateway.max_connections_per_address": 8192,
        "gateway.keys": {name: {"sha256": digest} for name, digest in hashes.items()},
    }


def measure(run_dir: Path, load: Load) -> Found:
    """Measure on a new stack."""
    with start_stack(run_dir, settings(), workers=WORKERS, name="kvasir") as stack:
        return asyncio.run(_measure(stack.target, load, lambda: stack.details("tenants")))


async def _measure(target: Target, load: Load, status: Any) -> Found:
    await _others(target, replace(load, duration_s=8.0, seed=load.seed + 1))
    alone = await _others(target, load)
    flood = asyncio.create_task(_flood(target, load))
    await asyncio.sleep(2.0)
    flooded = await _others(target, load)
    told = await asyncio.to_thread(status)
    flood.cancel()
    sent = await flood
    return Found(alone, flooded, sent, told)


async def _others(target: Target, load: Load) -> list[Answer]:
    """Return all answers to the two tenants."""
    drawn = random.Random(f"{load.seed}/others")
    tasks: list[asyncio.Task[Answer]] = []
    loop = asyncio.get_running_loop()
    began_s, at_s = loop.time(), 0.0
    while at_s < load.duration_s:
        at_s += drawn.expovariate(len(OTHERS) * load.rate)
        name = drawn.choice(OTHERS)
        prompt = _prompt(f"{name}/{drawn.randrange(_BEGINNINGS)}", _BEGINNING_TOKENS)
        prompt += _prompt(f"{drawn.random()}", _ASKED_TOKENS)
        await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
        tasks.append(asyncio.create_task(_ask(target, name, prompt, _ANSWER_TOKENS)))
    return list(await asyncio.gather(*tasks))


async def _flood(target: Target, load: Load) -> list[Answer]:
    """Send the flood until cancelled; return the requests answered or refused by then."""
    tasks: set[asyncio.Task[Answer]] = set()
    done: list[Answer] = []
    drawn = random.Random(f"{load.seed}/flood")
    loop = asyncio.get_running_loop()
    began_s, sent = loop.time(), 0

    def note(task: asyncio.Task[Answer]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            done.append(task.result())

    try:
        while True:
            sent += 1
            await asyncio.sleep(max(0.0, began_s + sent / (FLOOD_RATE * load.rate) - loop.time()))
            prompt = _prompt(f"{FLOODER}/{sent}", _FLOOD_TOKENS)
            task = asyncio.create_task(_ask(target, FLOODER, prompt, drawn.randrange(32, 128)))
            tasks.add(task)
            task.add_done_callback(note)
    except asyncio.CancelledError:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done


async def _ask(target: Target, name: str, prompt: list[int], tokens: int) -> Answer:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return await complete(replace(target, key=key_of(name)), body, _DEADLINE_S)


def _prompt(name: str, tokens: int) -> list[int]:
    drawn = random.Random(name)
    return drawn.choices(_VOCABULARY, k=tokens)


def figures(found: Found) -> dict[str, float]:
    """Return the figures of the two tenants, without and with the flood."""
    made: dict[str, float] = {}
    for side, answers in (("alone", found.alone), ("flooded", found.flooded)):
        good = [answer for answer in answers if answer.ok]
        latency_s = [answer.ended_s - answer.sent_s for answer in good]
        first_s = [answer.first_s for answer in good if answer.event_s]
        made |= {
            f"{side}_latency_p99_s": float(np.percentile(latency_s, 99)),
            f"{side}_ttft_p50_s": float(np.percentile(first_s, 50)),
            f"{side}_ttft_p99_s": float(np.percentile(first_s, 99)),
            f"{side}_cached": sum(answer.cached_tokens for answer in good)
            / sum(answer.prompt_tokens for answer in good),
        }
    made["flood_answered"] = float(sum(answer.ok for answer in found.flood))
    made["flood_refused"] = float(sum(not answer.ok for answer in found.flood))
    return made
