"""A request that kills its worker whenever it runs, beside others, on real processes."""

import asyncio
from pathlib import Path

import pytest

from bench.live.bad_day import client, poisoned
from tests.stack.client import assert_same
from tests.stack.prompts import long_questions
from tests.stack.running import running_stack

pytestmark = pytest.mark.stack


async def test_a_poisoned_request_ends_and_what_ran_beside_it_goes_on(tmp_path: Path) -> None:
    questions = long_questions(6, least_tokens=60, step_tokens=2, longest_words=120, seed=1)
    with running_stack(tmp_path / "run", workers=3) as stack:
        undisturbed = await stack.client().ask_all(questions)
        poison = {"model": stack.model.name, "prompt": "Once upon a time"}
        beside = asyncio.create_task(stack.client().ask_all(questions))
        said, killed = await poisoned(stack.run_dir, poison)
        assert "worker_killed" in said and len(killed) == 3, (said, killed)
        assert_same(await beside, undisturbed)
        async with client(stack.run_dir) as http:
            again = await http.post("/v1/completions", json=poison)
        assert again.status_code == 500 and again.json()["error"]["code"] == "worker_killed"
        troubles = (await asyncio.to_thread(stack.status))["troubles"]
        assert "gateway-0: requests that killed workers, and are refused: 1" in troubles
        assert_same(await stack.client().ask_all(questions), undisturbed)
