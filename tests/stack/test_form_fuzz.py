"""Forms drawn to end a process, against a gateway and its workers: each is answered or refused."""

import asyncio
import time
from collections import Counter

import httpx
import pytest

from tests.fuzz.schemas import request_of
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
AT_ONCE = 6
MOST_S, MOST_AGAIN = 3.0, 20
"""Of one request; those that took longer are asked again alone, as other things may have had the machine."""


async def ask(client: httpx.AsyncClient, seed: int, model: str) -> tuple[int, float, str]:
    path, body = request_of(seed, model)
    began_s = time.monotonic()
    reply = await client.post(path, content=body)
    return reply.status_code, time.monotonic() - began_s, reply.text


async def all_of(stack: RunningStack, seeds: range) -> None:
    before = [stack.child(name)["pid"] for name in ("gateway-0", "worker-0", "worker-1")]
    left, found, slow = iter(seeds), Counter[int](), list[int]()
    headers = {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as client:

        async def some() -> None:
            for seed in left:
                status, took_s, text = await ask(client, seed, stack.model.name)
                assert status in (200, 400), f"seed {seed}: {status} {text}"
                found[status] += 1
                if took_s > MOST_S:
                    slow.append(seed)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        alone = [(seed, await ask(client, seed, stack.model.name)) for seed in slow[:MOST_AGAIN]]
    print(dict(found), "slow:", slow)
    assert found.total() == len(seeds) and min(found[200], found[400]) > len(seeds) // 10
    assert [(seed, took_s) for seed, (_, took_s, _) in alone if took_s > MOST_S] == []
    assert [stack.child(name)["pid"] for name in ("gateway-0", "worker-0", "worker-1")] == before, (
        stack.logs()
    )


async def test_some_forms_end_no_process(stack: RunningStack) -> None:
    await all_of(stack, range(150))


@pytest.mark.slow
async def test_twenty_thousand_forms_end_no_process(stack: RunningStack) -> None:
    await all_of(stack, range(20_000))
