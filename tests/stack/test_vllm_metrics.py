"""The metrics under vLLM's names: each moves when requests are answered, by what they were."""

import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
STREAMS = 24
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
                assert sample.labels["model_name"] == simulated.model.name
                assert sample.labels["engine"] == "0"
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
    first = await simulated.client().ask_all(questions)
    again = await simulated.client().ask_all(questions)
    watching.cancel()
    assert all(answer.complete for answer in (*first, *again))
    tokens = sum(answer.completion_tokens for answer in (*first, *again))
    await asyncio.sleep(1.5)  # the scheduler's next announcement
    after = await asyncio.to_thread(read, simulated)
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert moved["generation_tokens_total"] == moved["request_generation_tokens_sum"] == tokens
    assert moved["prompt_tokens_total"] == moved["prefix_cache_queries_total"]
    assert 0 < moved["prefix_cache_hits_total"] < moved["prefix_cache_queries_total"]
    assert moved["request_success_total stop"] + moved["request_success_total length"] == 2 * STREAMS
    assert moved["request_params_max_tokens_sum"] == 2 * STREAMS * 150
    for name in HISTOGRAMS:
        assert moved[f"{name}_count"] > 0, name
        assert moved[f"{name}_sum"] > 0, name
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert moved[f"{name}_count"] == 2 * STREAMS, name
    for name in ("request_prefill_time_seconds", "request_inference_time_seconds"):
        assert moved[f"{name}_count"] == 2 * STREAMS, name
    in_steps = moved["iteration_tokens_total_sum"]
    assert in_steps >= moved["prompt_tokens_total"] - moved["prefix_cache_hits_total"] + tokens - 2 * STREAMS
    assert moved["request_queue_time_seconds_count"] >= 2 * STREAMS, "who is sent again waits again"
    assert moved["num_preemptions_total"] > 0
    assert most["num_requests_running"] > 1
    assert most["num_requests_waiting"] > 0
    assert 0.3 < most["kv_cache_usage_perc"] <= 1
    assert most["gpu_cache_usage_perc"] > 0
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["cache_config_info"] == 1
