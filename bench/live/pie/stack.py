"""Whole stacks of ours with and without Pie, over HTTP: the same requests, as many at a time."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.stacks import start
from bench.live.pie.loop import Request
from bench.live.pie.sides import BLOCK_TOKENS, HOST_MB, MOST_SEQUENCES, Ground
from bench.live.prefix.load import LoadResult, serve_all


@dataclass(frozen=True)
class StackRun:
    """One stack, once."""

    served: LoadResult
    details: Mapping[str, Any]
    """What the worker says of itself at the end."""


def serve(
    context: Context, ground: Ground, requests: list[Request], settings: Mapping[str, object], name: str
) -> StackRun:
    """Starts a stack, lets it settle on a quarter of the requests, measures the rest."""
    cores = Cores.choose()
    folder = context.run_dir.resolve() / f"stack-{name}"
    more = {
        "worker.cores": "[]",
        "worker.engine_cores": f"[{cores.engine}]",
        "worker.block_tokens": BLOCK_TOKENS,
        **settings,
    }
    bodies = [_body(each) for each in requests]
    stack = start(ground.model, cores.engine, ground.device_blocks, MOST_SEQUENCES, folder, more)
    try:
        settle = len(bodies) // 4
        asyncio.run(serve_all(stack.target, bodies[:settle], ground.clients))
        served = asyncio.run(serve_all(stack.target, bodies[settle:], ground.clients))
        return StackRun(served, stack.details("engine_s"))
    finally:
        stack.side.end()


def with_pie(ground: Ground) -> dict[str, object]:
    """Settings of a stack whose expansion is found while it runs."""
    return {
        "worker.pie.enabled": "true",
        "worker.pie.host_mb": HOST_MB,
        "worker.pie.bandwidth_limit": ground.bandwidth,
    }


def _body(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0,
    }
    return body if request.end_token_ids else {**body, "ignore_eos": True}


def normalized_s(served: LoadResult) -> float:
    """Mean seconds per token of the answer; 0 without answers."""
    answers = [each for each in served.answers if each.ok and each.completion_tokens]
    if not answers:
        return 0.0
    return sum((each.ended_s - each.sent_s) / each.completion_tokens for each in answers) / len(answers)
