"""A live run: a stack of our own services on this machine, chat requests at Poisson times, every step
overheard.

Prompts are drawn from the templates that Tiny Chat was trained with; answers end by themselves, greedily,
under one constant `max_tokens`. Knows nothing of the simulator.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.kit.load import Answer, Target, answers, complete
from bench.kit.processes import ProcessTree, free_port
from bench.kit.provenance import ROOT
from models.train_tiny_chat.stories import story_chat
from models.train_tiny_chat.templates import template_chat
from services.stack.access import BusAccess
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.bus import Bus, Listener
from shared.messages.plans import WorkerStepped

TINY_CHAT = ROOT / "models" / "tiny_chat"
_START_DEADLINE_S = 240.0
_REQUEST_DEADLINE_S = 300.0
_STORY_SHARE = 0.3
_LISTENER = Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped")


@dataclass(frozen=True)
class LiveStack:
    """A stack that answers."""

    target: Target
    run_dir: Path


@dataclass
class Tap:
    """Hears every worker's step reports, with the time at which each came."""

    steps: list[tuple[float, WorkerStepped]] = field(default_factory=list)

    def on_stepped(self, event: WorkerStepped) -> None:
        self.steps.append((time.perf_counter(), event))


@dataclass(frozen=True)
class LiveRun:
    """What one load met. `start_s` and the answers' times are `time.perf_counter()`."""

    start_s: float
    answers: list[Answer]
    steps: list[tuple[float, WorkerStepped]]
    max_tokens: int

    @property
    def failures(self) -> int:
        return sum(not one.ok or one.completion_tokens < 1 or not one.event_s for one in self.answers)


@contextmanager
def live_stack(folder: Path, settings: Mapping[str, object], workers: int = 1) -> Iterator[LiveStack]:
    """`python -m services up` for the length of a `with` block. Raises InternalError when it does not
    start.
    """
    port, run_dir = free_port(), folder / "stack"
    argv = [sys.executable, "-m", "services", "up", "--run-dir", str(run_dir), "--port", str(port)]
    argv += ["--nats-port", str(free_port()), "--workers", str(workers), "--model", str(TINY_CHAT)]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    side = ProcessTree("stack", argv, env, folder / "stack.log", ROOT)
    try:
        side.await_(lambda: answers(Target(port, TINY_CHAT.name), "/ready"), _START_DEADLINE_S)
        key = RunDirectory(run_dir).credentials().api_key
        yield LiveStack(Target(port, TINY_CHAT.name, key, "/v1/chat/completions"), run_dir)
    finally:
        side.end()


def chat_bodies(count: int, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """Request bodies: exercises and stories, as Tiny Chat knows them."""
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
    stack: LiveStack, bodies: Sequence[Mapping[str, Any]], rate_per_s: float, seed: int, max_tokens: int
) -> LiveRun:
    """All of `bodies` at Poisson times, drained."""
    return uvloop.run(_run_load(stack, bodies, rate_per_s, seed, max_tokens))


async def _run_load(
    stack: LiveStack, bodies: Sequence[Mapping[str, Any]], rate_per_s: float, seed: int, max_tokens: int
) -> LiveRun:
    draw, at_s, tap = random.Random(f"live/{seed}/arrivals"), 0.0, Tap()
    run = RunDirectory(stack.run_dir)
    config = BusAccess.from_state(run.read_state(), run.credentials()).config("placement-0")
    bus = await Bus.connect(config, service="placement", instance="bench-tap")
    try:
        await bus.attach([_LISTENER], tap)
        start_s, tasks = time.perf_counter(), []
        for body in bodies:
            at_s += draw.expovariate(rate_per_s)
            await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(complete(stack.target, dict(body), _REQUEST_DEADLINE_S)))
        answers_ = list(await asyncio.gather(*tasks))
        await asyncio.sleep(0.2)
    finally:
        await bus.close()
    return LiveRun(start_s, answers_, tap.steps, max_tokens)
