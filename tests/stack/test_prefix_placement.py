"""Two workers: prompts go where their beginning is stored, also after placement was killed and came back."""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
FAMILIES = 6
PREFIX_TOKENS = 320
BLOCK_TOKENS = 16
CALM_S = 1.0
"""News of a cache are on their way for 0.2 s, and a round of heartbeats for 0.25 s."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("prefix-placement") / "run"
    with running_stack(folder, settings=("placement.policy=prefix_aware",)) as running:
        yield running


def cached_tokens(stack: RunningStack, prompts: list[list[int]]) -> list[int]:
    """Asked all at once; what usage says of each."""

    def ask(prompt: list[int]) -> int:
        body = {"model": stack.model.name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        headers = {"Authorization": f"Bearer {stack.key}"}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def held_blocks(stack: RunningStack) -> dict[str, int]:
    """Of each worker, as far as placement knows."""
    return {row["worker"]: row["cached_blocks"] for row in stack.details("placement-0")["workers"]}


def test_a_prompt_goes_to_the_worker_that_has_its_beginning(pair: RunningStack) -> None:
    dice = random.Random(4)
    families = [[dice.randrange(100, 4000) for _ in range(PREFIX_TOKENS)] for _ in range(FAMILIES)]

    def prompts() -> list[list[int]]:
        return [[*family, *(dice.randrange(100, 4000) for _ in range(40))] for family in families]

    assert cached_tokens(pair, prompts()) == [0] * FAMILIES
    time.sleep(CALM_S)
    for _ in range(3):
        assert min(cached_tokens(pair, prompts())) >= PREFIX_TOKENS - BLOCK_TOKENS
    time.sleep(CALM_S)
    held = held_blocks(pair)
    assert len(held) == 2 and min(held.values()) > 0, f"one worker had nothing to do: {held}"

    pair.signal("placement-0", signal.SIGKILL)
    pair.until_restarted("placement-0", restarts=1)
    time.sleep(CALM_S)
    assert held_blocks(pair) == held, "a placement that is new asks what there is"
    assert min(cached_tokens(pair, prompts())) >= PREFIX_TOKENS - BLOCK_TOKENS
