"""While memory is full the policy decides who is next, not placement: the same requests, two policies."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
BLOCK_TOKENS, BLOCKS = 16, 64
SETTINGS = (
    f"worker.kv_blocks={BLOCKS}",
    f"worker.block_tokens={BLOCK_TOKENS}",
    "worker.prefix_cache.enabled=false",
    "predictor.model=constant",
)
FILLING = {"prompt": [20] * 940, "max_tokens": 80}
"""With its answer it takes all of the memory, for two seconds."""
LONG = {"prompt": [21] * 900, "max_tokens": 100}
"""Nothing runs beside it to its end."""
SHORT = {"prompt": [22] * 40, "max_tokens": 16}
SHORTS = 6


class Reader:
    """When each answer began."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self.began_s: dict[str, float] = {}

    async def ask(self, http: httpx.AsyncClient, name: str, body: dict[str, Any]) -> None:
        whole = {"model": self._stack.model.name, "stream": True, "ignore_eos": True, "seed": 1, **body}
        headers = {"Authorization": f"Bearer {self._stack.key}"}
        async with http.stream("POST", "/v1/completions", json=whole, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in line, line
                    self.began_s.setdefault(name, time.monotonic())

    async def until_begun(self, name: str) -> None:
        async with asyncio.timeout(STACK_PATIENCE_S):
            while name not in self.began_s:
                await asyncio.sleep(0.005)


async def order_of_starts(stack: RunningStack, priority: int | None = None) -> list[str]:
    """The long one asks first, the short ones after it, the last of them with `priority`, while another has
    the memory."""
    reader = Reader(stack)
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=STACK_PATIENCE_S) as http,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(reader.ask(http, "filling", FILLING))
        await reader.until_begun("filling")
        tasks.create_task(reader.ask(http, "long", LONG))
        await asyncio.sleep(0.2)
        for number in range(SHORTS):
            last = {"priority": priority} if number == SHORTS - 1 and priority is not None else {}
            tasks.create_task(reader.ask(http, f"short {number}", {**SHORT, **last}))
    return sorted(reader.began_s, key=reader.began_s.__getitem__)


@pytest.mark.parametrize(
    ("policy", "is_long_first"),
    [("scheduler.policy=vllm", True), ("scheduler.policy_options.passing_share=0.9", False)],
)
def test_the_policy_says_who_is_next(tmp_path: Path, policy: str, is_long_first: bool) -> None:
    """First come, first served: the long one, and nobody before it. `kvasir`: all short ones. With either,
    whoever has a lower priority is next, though it was the last to ask."""
    flags = ("--engine", "simulated")
    with running_stack(tmp_path / "run", workers=1, settings=(*SETTINGS, policy), flags=flags) as stack:
        begun = asyncio.run(order_of_starts(stack))
        assert begun[0] == "filling"
        assert begun.index("long") == (1 if is_long_first else SHORTS + 1), begun
        begun = asyncio.run(order_of_starts(stack, priority=-1))
        assert begun[:2] == ["filling", f"short {SHORTS - 1}"], begun
