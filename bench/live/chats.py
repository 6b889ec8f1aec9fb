"""Live runs: a stack on this machine, chat requests at Poisson times, and all its step reports.

Prompts come from the templates of Tiny Chat's training. Answers are greedy and end by themselves, under one
constant `max_tokens`.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import uvloop

from bench.kit.load import Answer, serve_all
from bench.kit.stacks import Stack, on_bus
from models.train_tiny_chat.stories import story_chat
from models.train_tiny_chat.templates import template_chat
from shared import subjects
from shared.bus import Listener
from shared.messages.plans import WorkerStepped
from sim.workloads import poisson_times

_STORY_SHARE = 0.3
_LISTENER = Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped")


@dataclass
class Tap:
    """Collects every worker's step reports with their arrival times."""

    steps: list[tuple[float, WorkerStepped]] = field(default_factory=list)

    def on_stepped(self, event: WorkerStepped) -> None:
        self.steps.append((time.perf_counter(), event))


@dataclass(frozen=True)
class LiveRun:
    """Result of one load. `start_s` and the answers' times are `time.perf_counter()`."""

    start_s: float
    answers: list[Answer]
    steps: list[tuple[float, WorkerStepped]]
    max_tokens: int

    @property
    def failures(self) -> int:
        return sum(not one.ok or one.completion_tokens < 1 or not one.event_s for one in self.answers)


def chat_bodies(count: int, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return request bodies: exercises and stories, as in Tiny Chat's training."""
    draw = random.Random(f"live/{seed}")
    chats = [story_chat(draw) if draw.random() < _STORY_SHARE else template_chat(draw) for _ in range(count)]
    return [
        {
            "messages": [{"role": role, "content": text} for role, text in chat.turns[:-1]],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        for chat in chats
    ]


def run_load(
    stack: Stack, bodies: Sequence[Mapping[str, Any]], rate_per_s: float, seed: int, max_tokens: int
) -> LiveRun:
    """Run all of `bodies` at Poisson times until every answer ended."""
    return uvloop.run(_run_load(stack, bodies, rate_per_s, seed, max_tokens))


async def _run_load(
    stack: Stack, bodies: Sequence[Mapping[str, Any]], rate_per_s: float, seed: int, max_tokens: int
) -> LiveRun:
    tap, target = Tap(), replace(stack.target, path="/v1/chat/completions")
    due_s = list(islice(poisson_times(random.Random(f"live/{seed}/arrivals"), rate_per_s), len(bodies)))
    async with on_bus(stack.run_dir, "placement-0", [_LISTENER], tap):
        sent = await serve_all(target, [dict(body) for body in bodies], len(bodies), due_s=due_s)
        await asyncio.sleep(0.2)
    return LiveRun(sent.began_s, list(sent.answers), tap.steps, max_tokens)
