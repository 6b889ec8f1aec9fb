"""Requests against a running stack, a fixed number of them at a time, and what came of them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.kit.load import Answer, Target, complete

_DEADLINE_S = 240.0


@dataclass(frozen=True)
class LoadResult:
    """One load, whole."""

    answers: Sequence[Answer]
    elapsed_s: float

    @property
    def failures(self) -> int:
        return sum(not answer.ok for answer in self.answers)

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """Prompts and answers."""
        return sum(one.prompt_tokens + one.completion_tokens for one in self.answers) / self.elapsed_s

    @property
    def cached_share(self) -> float:
        """Of all tokens of prompts, as usage says."""
        prompts = sum(answer.prompt_tokens for answer in self.answers)
        return sum(answer.cached_tokens for answer in self.answers) / prompts if prompts else 0.0


async def serve_all(target: Target, bodies: Sequence[dict[str, Any]], at_once: int) -> LoadResult:
    """In order, so many in flight; the next is sent when one ends."""
    slots = asyncio.Semaphore(at_once)

    async def one(body: dict[str, Any]) -> Answer:
        async with slots:
            return await complete(target, body, _DEADLINE_S)

    began_s = time.perf_counter()
    answers = await asyncio.gather(*(one(body) for body in bodies))
    return LoadResult(answers, time.perf_counter() - began_s)
