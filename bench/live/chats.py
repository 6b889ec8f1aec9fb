"""Live runs: a stack on this machine, chat requests at Poisson times, and all its step reports.

Prompts come from the templates of Tiny Chat's training. Answers are greedy and end by themselves, under one
constant `max_tokens`.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

from bench.kit.load import Answer, complete
from bench.kit.stacks import Stack, on_bus
from models.train_tiny_chat.stories import story_chat
from models.train_tiny_chat.templates import template_chat
from shared import subjects
from shared.bus import Listener
from shared.messages.plans import WorkerStepped

_REQUEST_DEADLINE_S = 300.0
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
    draw, at_s, tap = random.Random(f"live/{seed}/arrivals"), 0.0, Tap()
    target = replace(stack.target, path="/v1/chat/completions")
    async with on_bus(stack.run_dir, "placement-0", [_LISTENER], tap):
        start_s, tasks = time.perf_counter(), []
        for body in bodies:
            at_s += draw.expovariate(rate_per_s)
            await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(complete(target, dict(body), _REQUEST_DEADLINE_S)))
        answers = list(await asyncio.gather(*tasks))
        await asyncio.sleep(0.2)
    return LiveRun(start_s, answers, tap.steps, max_tokens)
