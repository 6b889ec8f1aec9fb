"""`services explain` accounts for the time of requests in a run with preemptions and a killed worker."""

import asyncio
import json
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STACK_PATIENCE_S
from tests.services.stack.test_chrome_trace import check_trace
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
STREAMS = 24
SETTINGS = ("worker.kv_blocks=96", "worker.simulated.speed=10")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("explain") / "run"
    with running_stack(folder, workers=3, settings=SETTINGS, flags=("--engine", "simulated")) as running:
        yield running


@pytest.fixture(scope="module")
def accounts(stack: RunningStack) -> list[dict[str, Any]]:
    """Of all requests of a run in whose middle a worker is killed."""
    prompts = mixed(STREAMS, longest_words=250, seed=3)
    questions = [Question(prompt, {"seed": seed, "max_tokens": 300}) for seed, prompt in enumerate(prompts)]

    async def kill() -> None:
        stack.signal("worker-1", signal.SIGKILL)

    answers = asyncio.run(stack.client().ask_all(questions, midway=kill, after=200))
    assert all(answer.complete for answer in answers), [answer.errors for answer in answers]
    stack.until_restarted("worker-1", restarts=1)
    deadline_s = time.monotonic() + STACK_PATIENCE_S
    while len(served(stack)) < STREAMS and time.monotonic() < deadline_s:
        time.sleep(0.1)  # a request is logged just after its client has the end
    return [explained(stack, request_id) for request_id in served(stack)]


def served(stack: RunningStack) -> list[str]:
    lines = (stack.run_dir / "logs" / "gateway-0.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines if '"event":"request"' in line]
    return [entry["request_id"] for entry in entries if "completion_tokens" in entry]


def explained(stack: RunningStack, request_id: str) -> dict[str, Any]:
    done = stack.command("explain", request_id, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_nearly_all_of_the_time_has_a_cause(accounts: list[dict[str, Any]]) -> None:
    shares = [each["account"]["accounted"] for each in accounts]
    assert len(shares) == STREAMS
    assert statistics.median(shares) >= 0.98, sorted(shares)
    assert min(shares) >= 0.95, sorted(shares)


def test_parts_add_up_to_the_wall_time_that_the_gateway_logged(
    stack: RunningStack, accounts: list[dict[str, Any]]
) -> None:
    lines = (stack.run_dir / "logs" / "gateway-0.log").read_text().splitlines()
    took_s = {
        (e := json.loads(line))["request_id"]: e["duration_s"] for line in lines if '"request_id"' in line
    }
    for each in accounts:
        spent_s = sum(cause["seconds"] for cause in each["account"]["causes"])
        assert spent_s == pytest.approx(took_s[each["request"]], abs=2e-3)


def test_the_loss_is_told_by_those_that_it_hit(accounts: list[dict[str, Any]]) -> None:
    hit = [each for each in accounts if each["account"]["facts"]["attempts"] > 1]
    assert hit
    told = {cause["cause"] for each in hit for cause in each["account"]["causes"]}
    assert {"its worker was lost", "in steps of a worker that is gone"} <= told


def test_for_people(stack: RunningStack, accounts: list[dict[str, Any]]) -> None:
    done = stack.command("explain", accounts[0]["request"], "--events")
    assert "of the time has a cause" in done.stdout
    assert "submitted" in done.stdout
    unknown = stack.command("explain", "req_0")
    assert unknown.returncode == 1
    assert "nobody remembers" in unknown.stdout


def test_a_recording_has_what_everybody_remembers(
    stack: RunningStack, accounts: list[dict[str, Any]], tmp_path: Path
) -> None:
    done = stack.command("record", "--out", str(tmp_path / "recording.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    head, *events = map(json.loads, (tmp_path / "recording.jsonl").read_text().splitlines())
    assert head["events"] == len(events)
    assert {"gateway-0", "scheduler-0", "worker-0"} <= set(head["instances"])
    assert {"submit", "submitted", "placed", "plan", "step", "request"} <= {event["kind"] for event in events}
    times = [event["unix_s"] for event in events]
    assert times == sorted(times)
    submitted = {event["request"] for event in events if event["kind"] == "submitted"}
    assert {each["request"] for each in accounts} <= submitted


def test_a_trace_for_perfetto_has_the_request_that_was_resumed(
    stack: RunningStack, accounts: list[dict[str, Any]], tmp_path: Path
) -> None:
    done = stack.command("record", "--perfetto", "--out", str(tmp_path / "trace.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(traced)
    resumed = next(each["request"] for each in accounts if each["account"]["facts"]["attempts"] > 1)
    stays = [each["name"] for each in traced if each.get("id") == resumed and each["ph"] == "b"]
    assert any("attempt 2" in name for name in stays), stays
    assert {"X", "b", "e", "C", "M"} <= {each["ph"] for each in traced}
