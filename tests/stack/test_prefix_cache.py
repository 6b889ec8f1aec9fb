"""Stored prefixes through the whole stack: what is asked again is fast, goes there, and is the same."""

import json
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import wait_until
from tests.stack.client import OTHER_KEY
from tests.stack.running import BLOCK_TOKENS, RunningStack, running_stack

pytestmark = pytest.mark.stack
MOST_CACHED = 1499 // BLOCK_TOKENS * BLOCK_TOKENS
"""Of a prompt of 1,500 tokens."""


@dataclass
class Timed:
    text: str
    first_token_s: float
    usage: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Tenant:
    """A client with a key of its own."""

    def __init__(self, stack: RunningStack, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key or stack.key}"}
        self._http = httpx.Client(base_url=stack.url, headers=headers, timeout=60)
        self._model = stack.model.name

    def ask(self, path: str, **fields: Any) -> Timed:
        """A streamed greedy answer."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "temperature": 0, **streamed, **fields}
        began_s, first_s, text = time.perf_counter(), 0.0, ""
        usage: dict[str, Any] = {}
        with self._http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    if piece and not first_s:
                        first_s = time.perf_counter() - began_s
                    text += piece
                usage = event.get("usage") or usage
        return Timed(text, first_s, usage)

    def complete(self, prompt: list[int], **fields: Any) -> Timed:
        return self.ask("/v1/completions", prompt=prompt, max_tokens=8, ignore_eos=True, **fields)

    def whole(self, prompt: list[int]) -> dict[str, Any]:
        """An answer that is not streamed."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        return dict(self._http.post("/v1/completions", json=body).json())

    def close(self) -> None:
        self._http.close()


def prompt_of(seed: int, tokens: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(100, 4000) for _ in range(tokens)]


@pytest.fixture
def tenant(featured: RunningStack) -> Iterator[Tenant]:
    made = Tenant(featured)
    yield made
    made.close()


def test_a_long_prompt_asked_again_has_its_first_token_at_once(tenant: Tenant) -> None:
    tenant.complete(prompt_of(0, 20))
    ratios = []
    for seed in (1, 2, 3):
        prompt = prompt_of(seed, 1500)
        first, second = tenant.complete(prompt), tenant.complete(prompt)
        assert (first.cached_tokens, second.cached_tokens) == (0, MOST_CACHED) and second.text == first.text
        ratios.append(second.first_token_s / first.first_token_s)
    assert min(ratios) <= 0.25
    whole = tenant.whole(prompt_of(3, 1500))
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": MOST_CACHED}


def test_a_chat_computes_its_new_turn_only(tenant: Tenant) -> None:
    messages = [{"role": "system", "content": "You answer in one sentence. " * 12}]
    known_tokens = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"Tell me something about the number {turn}."})
        answer = tenant.ask("/v1/chat/completions", messages=messages, max_tokens=12)
        prompt_tokens = int(answer.usage["prompt_tokens"])
        assert answer.cached_tokens >= known_tokens - BLOCK_TOKENS
        assert answer.cached_tokens <= prompt_tokens - 1
        known_tokens = prompt_tokens
        messages.append({"role": "assistant", "content": answer.text})
    assert known_tokens > 300


def test_a_cache_salt_keeps_requests_apart(tenant: Tenant) -> None:
    prompt = prompt_of(9, 200)
    assert [tenant.complete(prompt, cache_salt=salt).cached_tokens for salt in ("a", "b", "a")] == [0, 0, 192]


def test_two_keys_do_not_share(featured: RunningStack, tenant: Tenant) -> None:
    other = Tenant(featured, OTHER_KEY)
    prompt = prompt_of(5, 300)
    answers = [one.complete(prompt) for one in (tenant, other, tenant, other)]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 288, 288]
    assert len({answer.text for answer in answers}) == 1
    other.close()


def test_a_worker_that_ends_or_is_killed_finds_its_disk_again(tmp_path: Path) -> None:
    """What is hot goes to disk when a worker is stopped; what has left the device is there already."""
    settings = (
        f"worker.kv_blocks={64 * 16 // BLOCK_TOKENS}",
        "worker.host_memory.mb=40",
        "worker.prefix_cache.disk_mb=64",
        f"worker.prefix_cache.disk_path={tmp_path / 'kv'}",
    )
    with running_stack(tmp_path / "run", workers=1, settings=settings) as stack:
        tenant = Tenant(stack)
        prompt = prompt_of(8, 400)
        first = tenant.complete(prompt)
        stack.signal("worker-0", signal.SIGTERM)  # nothing has left the device: it is flushed
        stack.until_restarted("worker-0", restarts=1)
        again = tenant.complete(prompt)
        assert (first.cached_tokens, again.cached_tokens) == (0, 384) and again.text == first.text
        prompts = [prompt_of(seed, 400) for seed in range(4)]
        before = [tenant.complete(prompt).text for prompt in prompts]
        time.sleep(0.5)
        stack.signal("worker-0", signal.SIGKILL)
        stack.until_restarted("worker-0", restarts=2)
        after = [tenant.complete(prompt) for prompt in prompts]
        assert [answer.text for answer in after] == before and after[0].cached_tokens > 0
        disk = stack.details("worker-0")["prefix_tiers"][2]
        assert disk["hits"] > 0 and disk["faults"] == 0
        tenant.close()


FAMILIES = 6
PREFIX_TOKENS = 320
CALM_S = 1.0
"""News of a cache are on their way for 0.2 s, and a round of heartbeats for 0.25 s."""


def cached_tokens(
    stack: RunningStack, prompts: list[list[int]], at_once: int = 1, max_tokens: int = 4
) -> list[int]:
    """Return the cached tokens of each prompt, as usage reports them, with `at_once` requests at a time."""

    def ask(prompt: list[int]) -> int:
        body = {"model": stack.model.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        headers = {"Authorization": f"Bearer {stack.key}"}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, prompts))


def held_blocks(stack: RunningStack) -> dict[str, int]:
    """Of each worker, as far as placement knows."""
    return {row["worker"]: row["cached_blocks"] for row in stack.details("placement-0")["workers"]}


def test_a_prompt_goes_to_the_worker_that_has_its_beginning(stack: RunningStack) -> None:
    """Later prompts come one at a time: of several at once, a busy worker sheds some that it has cached.
    The first answers are long, so that all are open at once on a busy machine, too."""
    wait_until(lambda: all(stack.details(f"worker-{each}")["epoch"] for each in range(2)))  # have a scheduler
    dice = random.Random(4)
    families = [[dice.randrange(100, 4000) for _ in range(PREFIX_TOKENS)] for _ in range(FAMILIES)]

    def prompts() -> list[list[int]]:
        return [[*family, *(dice.randrange(100, 4000) for _ in range(40))] for family in families]

    before = stack.details("scheduler-0")
    assert cached_tokens(stack, prompts(), at_once=FAMILIES, max_tokens=200) == [0] * FAMILIES
    time.sleep(CALM_S)
    for _ in range(3):
        assert min(cached_tokens(stack, prompts())) >= PREFIX_TOKENS - BLOCK_TOKENS
    time.sleep(CALM_S)
    held = held_blocks(stack)
    assert len(held) == 2 and min(held.values()) > 0, f"one worker had nothing to do: {held}"

    after = stack.details("scheduler-0")
    found, wrong, placed = (
        after[name] - before[name]
        for name in ("hits_found_tokens", "hits_error_tokens", "placed_prompt_tokens")
    )
    assert found > 0 and wrong <= 0.1 * placed
    metrics = httpx.get(f"{stack.operator_url}/metrics", timeout=30).text
    assert 'kvasir_fleet_prefix_tokens{kind="found"}' in metrics
    routes = [line for line in stack.logs(1000).splitlines() if "route" in line]
    assert any("costs_s" in line and "worker-0" in line and "worker-1" in line for line in routes)

    restarts = stack.child("placement-0")["restarts"]
    stack.signal("placement-0", signal.SIGKILL)
    stack.until_restarted("placement-0", restarts=restarts + 1)
    time.sleep(CALM_S)
    assert held_blocks(stack) == held, "a placement that is new asks what there is"
    assert min(cached_tokens(stack, prompts())) >= PREFIX_TOKENS - BLOCK_TOKENS
