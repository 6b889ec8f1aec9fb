"""A request that kills its worker whenever it runs, beside others, on real processes."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import assert_same
from tests.stack.prompts import long_questions
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
POISON = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}


async def poisoned(stack: RunningStack, http: httpx.AsyncClient, killed: list[str]) -> str:
    """What the stream says at its end; its worker is killed twelve tokens after each start."""
    said, tokens, due = "", 0, 12
    async with http.stream("POST", "/v1/completions", json=POISON | {"model": stack.model.name}) as answer:
        async for line in answer.aiter_lines():
            said, tokens = line if "error" in line else said, tokens + line.startswith("data: {")
            if tokens >= due and not said:
                worker = await runner(stack, http, answer.headers["x-kvasir-request-id"], len(killed))
                stack.signal(worker, signal.SIGKILL)
                killed.append(worker)
                due = tokens + 12
    return said


async def runner(stack: RunningStack, http: httpx.AsyncClient, request_id: str, before: int) -> str:
    """The worker that sent its latest tokens."""
    while True:
        told = (await http.get(f"{stack.operator_url}/ui/requests/{request_id}")).json()
        placed = [event for event in told["events"] if event["kind"] == "placed"]
        if len(placed) > before:
            return str(placed[-1]["worker"])
        await asyncio.sleep(0.1)


async def test_a_poisoned_request_ends_and_what_ran_beside_it_goes_on(tmp_path: Path) -> None:
    questions = long_questions(6, least_tokens=60, step_tokens=2, longest_words=120, seed=1)
    with running_stack(tmp_path / "run", workers=3) as stack:
        undisturbed = await stack.client().ask_all(questions)
        killed: list[str] = []
        headers = {"Authorization": f"Bearer {stack.key}"}
        limits: dict[str, Any] = {"timeout": STACK_PATIENCE_S, "trust_env": False, "headers": headers}
        async with httpx.AsyncClient(base_url=stack.url, **limits) as http:
            beside = asyncio.create_task(stack.client().ask_all(questions))
            said = await poisoned(stack, http, killed)
            assert "worker_killed" in said and len(killed) == 3
            assert_same(await beside, undisturbed)
            again = await http.post("/v1/completions", json=POISON | {"model": stack.model.name})
        assert again.status_code == 500 and again.json()["error"]["code"] == "worker_killed"
        troubles = (await asyncio.to_thread(stack.status))["troubles"]
        assert "gateway-0: requests that killed workers, and are refused: 1" in troubles
        assert_same(await stack.client().ask_all(questions), undisturbed)
