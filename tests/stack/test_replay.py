"""A real stack's recording in the simulator: it decides as the stack did; and what else would have been."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from sim.replay import Replay, read_recording
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
REQUESTS = 50
_WORKERS = ("worker.kv_blocks=64", "worker.simulated.speed=0.3", "worker.prefix_cache.enabled=false")
SETTINGS = (*_WORKERS, "scheduler.relief=false")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("replay") / "run"
    with running_stack(folder, workers=2, settings=SETTINGS, flags=("--engine", "simulated")) as running:
        asyncio.run(load(running))
        yield running


async def load(stack: RunningStack) -> None:
    """More than there is memory for: who waits, and who goes first, is decided."""
    drawn, asked = Random(5), []
    for seed, prompt in enumerate(mixed(REQUESTS, longest_words=120, seed=3)):
        question = Question(prompt, {"seed": seed, "max_tokens": 60})
        asked.append(asyncio.create_task(stack.client().ask_all([question])))
        await asyncio.sleep(drawn.expovariate(5))
    answers = await asyncio.gather(*asked)
    assert all(answer.complete for (answer,) in answers)


def test_the_simulator_decides_as_the_stack_did(stack: RunningStack, tmp_path: Path) -> None:
    """Who starts before whom, and beside whom: all but what came within a moment of a step's end."""
    path = tmp_path / "recording.jsonl"
    done = stack.command("record", "--out", str(path))
    assert done.returncode == 0, done.stderr
    replay = Replay(read_recording(path))
    outcome = replay.as_it_was()
    agreed = replay.agreement(outcome)
    assert agreed.requests == REQUESTS and agreed.same_order > 0.98 and agreed.same_batches > 0.85
    live_s = sum((each.ended_s or 0.0) - each.arrival_s for each in replay.run.requests)
    assert sum(record.jct_s for record in outcome.records) == pytest.approx(live_s, rel=0.1)


def test_explain_says_what_another_setting_would_have_made_of_it(stack: RunningStack, tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    assert stack.command("record", "--out", str(path)).returncode == 0
    replay = Replay(read_recording(path))
    records = replay.otherwise().records  # a wait of the machine's own is in none of them
    slow = max(
        zip(replay.run.requests, records, strict=True), key=lambda each: each[1].queue_s + each[1].gt_wait_s
    )[0].name[0]
    shown = stack.command("explain", slow, "--what-if")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    text = " ".join(shown.stdout.split())
    assert "it would have ended with ecoserve " in text and "with one more worker " in text
    done = stack.command("explain", slow, "--json", "--what-if", "vllm", "+2")
    told = json.loads(done.stdout)["what_if"]
    assert [(each["policy"], each["workers"]) for each in told["what_if"]] == [("vllm", 2), ("kvasir", 4)]
    assert told["what_if"][1]["later_s"] < 0.0, "two more workers, and who waited longest still waits as long"


def test_what_cannot_be_replayed_is_said(stack: RunningStack) -> None:
    told = stack.command("explain", "req_0", "--what-if")
    assert "nobody remembers req_0" in told.stdout
