"""Three keys over real sockets, one of which floods: the others are answered before most of the flood."""

import asyncio
import hashlib
import json
import random
import time
from pathlib import Path

import pytest

from tests.stack.client import Answer, Client, Question
from tests.stack.prompts import passage
from tests.stack.running import running_stack

pytestmark = pytest.mark.stack
FLOOD, ASKED = 40, 4


def keys_of(**classes: str) -> str:
    return json.dumps(
        {
            name: {"sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), "class": service_class}
            for name, service_class in classes.items()
        }
    )


async def test_one_that_floods_waits_for_the_others(tmp_path: Path) -> None:
    """The flood needs many times the memory there is; the two that come last are served before most of it."""
    settings = (
        f"gateway.keys={keys_of(flood='sheddable', a='standard', b='guaranteed')}",
        "worker.kv_blocks=96",
        "scheduler.log_level=debug",
        "worker.simulated.speed=4",
    )
    flags = ("--engine", "simulated")
    with running_stack(tmp_path / "run", workers=2, settings=settings, flags=flags) as stack:
        clients = {name: Client(stack.url, f"sk-{name}", stack.model.name) for name in ("flood", "a", "b")}
        await clients["a"].ask_all([Question("Hello", {"seed": 1, "max_tokens": 4})])
        ended: list[tuple[str, float]] = []

        async def ask(name: str, seed: int, words: int, tokens: int) -> Answer:
            body = {"seed": seed, "max_tokens": tokens, "ignore_eos": True}
            prompt = passage(words, random.Random(f"{name}/{seed}"))
            (answer,) = await clients[name].ask_all([Question(prompt, body)])
            ended.append((name, time.monotonic()))
            return answer

        flood = [asyncio.create_task(ask("flood", seed, 300, 60)) for seed in range(FLOOD)]
        await asyncio.sleep(1.0)
        asked = [asyncio.create_task(ask("ab"[seed % 2], seed, 20, 20)) for seed in range(2 * ASKED)]
        answers = await asyncio.gather(*flood, *asked)
        assert all(answer.complete for answer in answers), [answer.errors for answer in answers]
        ended.sort(key=lambda one: one[1])
        last = max(at for at, (name, _) in enumerate(ended) if name != "flood")
        assert last < len(ended) - FLOOD // 3, "most of the flood came after them"
        rows = {row["tenant"]: row for row in stack.details("scheduler-0")["tenants"]}
        assert rows["flood"]["sequences"] == FLOOD
        assert rows["a"]["sequences"] >= ASKED and rows["b"]["sequences"] == ASKED
        logs = stack.command("logs", "--lines", "5000", "scheduler-0").stdout
        turn = next(line for line in logs.splitlines() if "turn" in line and "served_s" in line)
        assert "costs_s" in turn and "flood" in turn, turn
        assert all(row["kv_token_s"] > 0 and row["generated_tokens"] > 0 for row in rows.values())
