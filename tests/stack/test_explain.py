"""`services explain` accounts for the time of requests; metrics under vLLM's names move as they should."""

import asyncio
import json
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import STACK_PATIENCE_S
from tests.services.stack.test_commands import check_trace
from tests.stack.client import Question
from tests.stack.conftest import stack_of
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
STREAMS, EXPLAINED = 24, 12
SETTINGS = ("worker.kv_blocks=96", "worker.simulated.speed=10")
stack = stack_of("stack", workers=3, settings=SETTINGS, flags=("--engine", "simulated"))


@pytest.fixture(scope="module")
def accounts(stack: RunningStack) -> list[dict[str, Any]]:
    """Of all requests of a run in whose middle a worker is killed."""
    prompts = mixed(EXPLAINED, longest_words=250, seed=3)
    questions = [Question(prompt, {"seed": seed, "max_tokens": 300}) for seed, prompt in enumerate(prompts)]
    answers = asyncio.run(stack.ask_and_kill(questions, 60, "worker-1"))
    assert all(answer.complete for answer in answers), [answer.errors for answer in answers]
    deadline_s = time.monotonic() + STACK_PATIENCE_S
    while len(served(stack)) < EXPLAINED and time.monotonic() < deadline_s:
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
    assert len(shares) == EXPLAINED
    assert statistics.median(shares) >= 0.98, sorted(shares)
    assert min(shares) >= 0.95, sorted(shares)


def test_parts_add_up_to_the_logged_wall_time(stack: RunningStack, accounts: list[dict[str, Any]]) -> None:
    lines = (stack.run_dir / "logs" / "gateway-0.log").read_text().splitlines()
    took_s = {(e := json.loads(li))["request_id"]: e["duration_s"] for li in lines if '"request_id"' in li}
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
    assert "of the time has a cause" in done.stdout and "submitted" in done.stdout
    unknown = stack.command("explain", "req_0")
    assert unknown.returncode == 1 and "nobody remembers" in unknown.stdout


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


HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_decode_time_seconds",
    "request_prefill_time_seconds",
    "request_inference_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
Samples = dict[str, float]


def read(simulated: RunningStack) -> Samples:
    """Values of vLLM's names; of those with a reason, by it."""
    with urllib.request.urlopen(f"{simulated.operator_url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and "le" not in sample.labels:
                assert sample.labels["model_name"] == simulated.model.name and sample.labels["engine"] == "0"
                reason = sample.labels.get("finished_reason", "")
                found[sample.name.removeprefix("vllm:") + (f" {reason}" if reason else "")] = sample.value
    return found


async def test_each_moves_by_what_was_asked(simulated: RunningStack) -> None:
    before = await asyncio.to_thread(read, simulated)
    prompts = mixed(STREAMS, longest_words=200, seed=8)
    questions = [Question(prompt, {"seed": seed, "max_tokens": 150}) for seed, prompt in enumerate(prompts)]
    most: Samples = {}

    async def watch() -> None:
        while True:
            for name, value in (await asyncio.to_thread(read, simulated)).items():
                most[name] = max(most.get(name, 0.0), value)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    answers = await simulated.client().ask_all(questions)
    while len(answers) < 2 * STREAMS or not (most["num_requests_waiting"] or len(answers) > 9 * STREAMS):
        answers += await simulated.client().ask_all(questions)
    watching.cancel()
    count = len(answers)
    assert all(answer.complete for answer in answers)
    tokens = sum(answer.completion_tokens for answer in answers)
    await asyncio.sleep(1.5)  # the scheduler's next announcement
    after = await asyncio.to_thread(read, simulated)
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert moved["generation_tokens_total"] == moved["request_generation_tokens_sum"] == tokens
    assert moved["prompt_tokens_total"] == moved["prefix_cache_queries_total"]
    assert 0 < moved["prefix_cache_hits_total"] < moved["prefix_cache_queries_total"]
    assert moved["request_success_total stop"] + moved["request_success_total length"] == count
    assert moved["request_params_max_tokens_sum"] == count * 150
    for name in HISTOGRAMS:
        assert moved[f"{name}_count"] > 0, name
        assert moved[f"{name}_sum"] > 0, name
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert moved[f"{name}_count"] == count, name
    for name in ("request_prefill_time_seconds", "request_inference_time_seconds"):
        assert moved[f"{name}_count"] == count, name
    in_steps = moved["iteration_tokens_total_sum"]
    assert in_steps >= moved["prompt_tokens_total"] - moved["prefix_cache_hits_total"] + tokens - count
    assert moved["request_queue_time_seconds_count"] >= count, "who is sent again waits again"
    assert moved["num_preemptions_total"] > 0 and most["num_requests_running"] >= 1  # of samples
    assert most["num_requests_waiting"] > 0 and 0.3 < most["kv_cache_usage_perc"] <= 1
    assert most["gpu_cache_usage_perc"] > 0
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["cache_config_info"] == 1
