"""Two workers: prompts go where their beginning is stored, also after placement was killed and came back."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.stack.running import BLOCK_TOKENS, RunningStack

pytestmark = pytest.mark.stack
FAMILIES = 6
PREFIX_TOKENS = 320
CALM_S = 1.0
"""News of a cache are on their way for 0.2 s, and a round of heartbeats for 0.25 s."""


def cached_tokens(stack: RunningStack, prompts: list[list[int]], at_once: int = 1) -> list[int]:
    """Return the cached tokens of each prompt, as usage reports them, with `at_once` requests at a time."""

    def ask(prompt: list[int]) -> int:
        body = {"model": stack.model.name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
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
    """Later prompts come one at a time: of several at once, a busy worker sheds some that it has cached."""
    dice = random.Random(4)
    families = [[dice.randrange(100, 4000) for _ in range(PREFIX_TOKENS)] for _ in range(FAMILIES)]

    def prompts() -> list[list[int]]:
        return [[*family, *(dice.randrange(100, 4000) for _ in range(40))] for family in families]

    before = stack.details("scheduler-0")
    assert cached_tokens(stack, prompts(), at_once=FAMILIES) == [0] * FAMILIES
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
