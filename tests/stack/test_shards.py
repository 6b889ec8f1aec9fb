"""Two schedulers, each with a part of the workers, live: one dies or stops, a worker dies, a chat goes on."""

import asyncio
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import pytest

from shared.shards import shard_of
from tests.patience import STACK_PATIENCE_S, wait_until
from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import long_questions, passage
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
STREAMS = 10
SETTINGS = ("worker.kv_blocks=512", "placement.log_level=debug")
sharded = stack_of("sharded", workers=4, settings=SETTINGS, flags=("--schedulers", "2"))


def questions() -> list[Question]:
    return long_questions(STREAMS, least_tokens=80, step_tokens=4, longest_words=120, seed=3)


@pytest.fixture(scope="module")
def undisturbed(roomy: RunningStack) -> list[Answer]:
    """As one scheduler with one worker gives them."""
    return roomy.answers(questions())


def leaders(stack: RunningStack) -> dict[int, str]:
    return {row["shard"]: row["leader"] for row in stack.details("scheduler-0")["shards"]}


def until_even(stack: RunningStack) -> dict[int, str]:
    """Wait until each scheduler leads one shard, with all of its workers."""
    deadline_s = time.monotonic() + STACK_PATIENCE_S
    while True:
        led, rows = leaders(stack), stack.details("gateway-0")["shards"]
        is_even = set(led.values()) == {"scheduler-0", "scheduler-1"}
        if is_even and {row["shard"]: row["workers"] for row in rows} == {0: 3, 1: 1}:
            return led
        assert time.monotonic() < deadline_s, (led, rows)
        time.sleep(0.2)


def routes(stack: RunningStack) -> dict[str, list[str]]:
    """Workers of each request, in order, as placement has logged them."""
    found: dict[str, list[str]] = {}
    for line in (stack.run_dir / "logs" / "placement-0.log").read_text().splitlines():
        said = json.loads(line)
        if said.get("event") == "route":
            found.setdefault(said["ref"].split("/")[0], []).append(said["worker"])
    return found


def test_both_shards_answer_as_one_scheduler_does(sharded: RunningStack, undisturbed: list[Answer]) -> None:
    until_even(sharded)
    before = routes(sharded)
    assert_same(sharded.answers(questions()), undisturbed)
    new = {name: workers for name, workers in routes(sharded).items() if name not in before}
    assert {shard_of(workers[-1], 2) for workers in new.values()} == {0, 1}
    status = sharded.command("status").stdout
    assert "leads 0" in status and "leads 1" in status, status


@pytest.mark.parametrize(
    "victims", [["scheduler-1"], ["scheduler-0"], ["worker-2"], ["scheduler-1", "worker-0"]]
)
async def test_nothing_is_lost(sharded: RunningStack, undisturbed: list[Answer], victims: list[str]) -> None:
    await asyncio.to_thread(until_even, sharded)
    assert_same(await sharded.ask_and_kill(questions(), 60, *victims), undisturbed)
    await asyncio.to_thread(until_even, sharded)


@dataclass
class Paced:
    """One stream and the longest pause between two of its chunks."""

    request_id: str = ""
    pause_s: float = 0.0
    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)


async def paced(
    stack: RunningStack, asked: list[Question], midway: Callable[[], Awaitable[None]]
) -> list[Paced]:
    """All answers at once; `midway` runs once each has some chunks."""
    streams = [Paced() for _ in asked]

    async def read(http: httpx.AsyncClient, question: Question, paced: Paced) -> None:
        body = question.body(stack.model.name)
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            paced.request_id = response.headers["x-kvasir-request-id"]
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    paced.arrivals_s.append(time.monotonic())
                    paced.text += "".join(
                        each["delta"].get("content") or "" for each in json.loads(line[6:])["choices"]
                    )

    headers = {"Authorization": f"Bearer {stack.key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as http:
        tasks = [asyncio.create_task(read(http, *pair)) for pair in zip(asked, streams, strict=True)]
        async with asyncio.timeout(STACK_PATIENCE_S):
            while min(len(each.arrivals_s) for each in streams) < 10:
                await asyncio.sleep(0.005)
        await midway()
        await asyncio.gather(*tasks)
    for each in streams:
        each.pause_s = max(b - a for a, b in zip(each.arrivals_s, each.arrivals_s[1:], strict=False))
    return streams


async def test_a_scheduler_that_stops_costs_the_other_shard_nothing(sharded: RunningStack) -> None:
    led = await asyncio.to_thread(until_even, sharded)
    asked = long_questions(8, least_tokens=500, step_tokens=1, longest_words=40, seed=5)

    async def nothing() -> None:
        pass

    async def stop() -> None:
        sharded.signal(led[1], signal.SIGSTOP)

    restarts = sharded.child(led[1])["restarts"]
    before = await paced(sharded, asked, nothing)
    after = await paced(sharded, asked, stop)
    assert [each.text for each in after] == [each.text for each in before]
    workers = routes(sharded)
    by_shard: dict[int, list[float]] = {0: [], 1: []}
    for each in after:
        by_shard[shard_of(workers[each.request_id][-1], 2)].append(each.pause_s)
    usual_s = max(each.pause_s for each in before)
    assert max(by_shard[0]) < usual_s + 0.5, (by_shard, usual_s)
    assert max(by_shard[1]) > 1.0, (by_shard, usual_s)
    await asyncio.to_thread(sharded.until_restarted, led[1], restarts=restarts + 1)
    await asyncio.to_thread(until_even, sharded)


async def test_a_chat_goes_on_where_its_prefix_is(sharded: RunningStack) -> None:
    """Its second turn is submitted to shard 0, as nothing runs, and handed over to shard 1."""
    await asyncio.to_thread(until_even, sharded)
    first = Question(passage(500, random.Random(11)) + " Who are you?", {"temperature": 0, "max_tokens": 20})
    second = Question(first.prompt + " And what can you do?", first.fields)
    (busy,) = long_questions(1, least_tokens=1200, step_tokens=1, longest_words=20, seed=6)
    before = routes(sharded)

    async def ask_first() -> None:
        await asyncio.to_thread(wait_until, lambda: sharded.details("gateway-0")["shards"][0]["running"])
        await sharded.client().ask_all([first])

    await paced(sharded, [busy], ask_first)  # shard 0 has one sequence, shard 1 none
    shards = [shard_of(workers[-1], 2) for name, workers in routes(sharded).items() if name not in before]
    assert shards == [0, 1]
    await asyncio.sleep(1.5)  # until all have announced that they are idle
    handed_over = sharded.details("placement-0")["to_other_shards"]
    (answer,) = await sharded.client().ask_all([second])
    assert answer.complete and answer.cached_tokens > 300, answer
    assert sharded.details("placement-0")["to_other_shards"] == handed_over + 1
