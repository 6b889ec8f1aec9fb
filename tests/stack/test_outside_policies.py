"""Policies on real stacks: the examples of the docs, those that raise, and who is next."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.installed import EXAMPLES, KINDS, install_examples
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
SIMULATED = ("--engine", "simulated")


def ask(stack: RunningStack, max_tokens: int = 20, prompt: str = "hello") -> httpx.Response:
    body = {"model": stack.model.name, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {stack.key}"}
    return httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_the_examples_of_the_docs_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four in one stack, each by its name in the configuration: two by file, two by entry point."""
    by_file = {kind: name.replace(str(EXAMPLES), "docs/examples") for kind, name in KINDS.items()}
    installed = install_examples(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = {k: by_file[k] if k in ("policy", "eviction") else n for k, n in installed.items()}
    settings = (
        f"scheduler.policy={names['policy']}",
        f"placement.policy={names['placement']}",
        f"predictor.model={names['predictor']}",
        f"worker.prefix_cache.eviction={names['eviction']}",
    )
    with running_stack(tmp_path / "run", settings=settings, flags=SIMULATED) as stack:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda number: ask(stack, prompt=f"{number} " * 40), range(6)))
        assert [one.status_code for one in answers] == [200] * 6, answers[0].text
        details = {row["service"]: row["details"] for row in stack.status()["services"]}
        assert names["policy"].rpartition("/")[2] in details["scheduler"]["policy"]
        assert names["placement"].rpartition("/")[2] in details["placement"]["policy"]
        assert details["predictor"]["model"] == "half-of-limit" and details["predictor"]["predictions"] > 0
        assert not any(each.get("trouble") for each in details.values())


BROKEN = """
from services.scheduler.policy.first_come import VllmPolicy
from services.worker.kv.core.eviction import EvictionOrder

class PlanFails(VllmPolicy):
    def plan(self, now_s):
        batch = super().plan(now_s)
        if batch and batch.decodes:
            raise ValueError("my own mistake")
        return batch

class ArrivalFails(VllmPolicy):
    def on_arrival(self, task, now_s):
        if task.max_tokens == 33:
            raise ValueError("my own mistake")
        super().on_arrival(task, now_s)

class ChoiceFails:
    def choose(self, size_tokens, rooms):
        raise ValueError("my own mistake")

class LengthFails:
    name = version = "fails"
    def __init__(self, settings):
        pass
    def predict(self, prompt, *, max_tokens, generated_tokens=0):
        raise ValueError("my own mistake")
    def observe(self, sample):
        raise ValueError("my own mistake")

class RankFails(EvictionOrder):
    def rank(self, node):
        raise ValueError("my own mistake")
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A relative path, from where the user stands."""
    (tmp_path / "broken.py").write_text(BROKEN)
    yield str(tmp_path / "broken.py")


def long_ones(stack: RunningStack, pool: ThreadPoolExecutor) -> list[Any]:
    """Two that run while something fails."""
    found = [pool.submit(ask, stack, 120) for _ in range(2)]
    time.sleep(0.5)
    return found


@pytest.mark.parametrize(
    ("fallible", "others"),
    [
        ({"scheduler.policy": "PlanFails"}, 503),
        (
            {
                "scheduler.policy": "ArrivalFails",
                "predictor.model": "LengthFails",
                "worker.prefix_cache.eviction": "RankFails",
            },
            200,
        ),
        ({"placement.policy": "ChoiceFails"}, 503),
    ],
)
def test_a_policy_that_raises_is_told_at_once_and_others_are_served(
    tmp_path: Path, broken: str, fallible: dict[str, str], others: int
) -> None:
    """Clients wait meanwhile. Before, nobody had an answer for 85 s, the scheduler began anew fifteen times a
    second, and all was well in the status."""
    settings = (*(f"{where}={broken}:{name}" for where, name in fallible.items()), "worker.kv_blocks=64")
    workers = 2 if "placement.policy" in fallible else 1  # placement chooses only among several
    with running_stack(tmp_path / "run", workers=workers, settings=settings, flags=SIMULATED) as stack:
        with ThreadPoolExecutor(4) as pool:
            running = long_ones(stack, pool)
            began_s = time.monotonic()
            answer = ask(stack, 33)
            took_s = time.monotonic() - began_s
            assert [one.result().status_code for one in running] == [others] * 2
        told = answer.json()["error"]["message"]
        assert answer.status_code == 503 and "ValueError: my own mistake (broken.py:" in told, told
        assert "placement.policy" in fallible or (took_s < 5.0 and fallible["scheduler.policy"] in told), told
        for where in fallible:
            assert "my own mistake" in stack.details(f"{where.partition('.')[0]}-0")["trouble"]
        assert "well: no" in stack.command("status").stdout and stack.child("scheduler-0")["restarts"] == 0
        log = (stack.run_dir / "logs" / "scheduler-0.log").read_text()
        assert log.count("leading") == 1, "no term ended"


def test_a_mistyped_file_or_class_is_told_before_anything_starts(tmp_path: Path) -> None:
    stack = RunningStack(tmp_path / "run", Path("models/tiny_chat"))
    for name, says in (
        ("nowhere.py:Mine", "there is no file"),
        ("docs/examples/longest_first.py:Mine", "its classes are: LongestFirst"),
        (
            "docs/examples/fewest_sequences.py:FewestSequences",
            "lacks what a batching policy needs: on_arrival",
        ),
    ):
        done = stack.command("up", "--port", "0", "--set", f"scheduler.policy={name}")
        assert done.returncode == 2 and says in done.stderr, done.stderr


BLOCK_TOKENS, BLOCKS = 16, 64
SETTINGS = (
    f"worker.kv_blocks={BLOCKS}",
    f"worker.block_tokens={BLOCK_TOKENS}",
    "worker.prefix_cache.enabled=false",
    "predictor.model=constant",
)
FILLING = {"prompt": [20] * 940, "max_tokens": 80}
"""With its answer it takes all of the memory, for two seconds."""
LONG = {"prompt": [21] * 900, "max_tokens": 100}
"""Nothing runs beside it to its end."""
SHORT = {"prompt": [22] * 40, "max_tokens": 16}
SHORTS = 6


class Reader:
    """When each answer began."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self.began_s: dict[str, float] = {}

    async def ask(self, http: httpx.AsyncClient, name: str, body: dict[str, Any]) -> None:
        whole = {"model": self._stack.model.name, "stream": True, "ignore_eos": True, "seed": 1, **body}
        headers = {"Authorization": f"Bearer {self._stack.key}"}
        async with http.stream("POST", "/v1/completions", json=whole, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in line, line
                    self.began_s.setdefault(name, time.monotonic())

    async def until_begun(self, name: str) -> None:
        async with asyncio.timeout(STACK_PATIENCE_S):
            while name not in self.began_s:
                await asyncio.sleep(0.005)


async def order_of_starts(stack: RunningStack, priority: int | None = None) -> list[str]:
    """The long one asks first, the short ones after it, the last of them with `priority`, while another has
    the memory."""
    reader = Reader(stack)
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=STACK_PATIENCE_S) as http,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(reader.ask(http, "filling", FILLING))
        await reader.until_begun("filling")
        tasks.create_task(reader.ask(http, "long", LONG))
        await asyncio.sleep(0.2)
        for number in range(SHORTS):
            last = {"priority": priority} if number == SHORTS - 1 and priority is not None else {}
            tasks.create_task(reader.ask(http, f"short {number}", {**SHORT, **last}))
    return sorted(reader.began_s, key=reader.began_s.__getitem__)


@pytest.mark.parametrize(
    ("policy", "is_long_first"),
    [("scheduler.policy=vllm", True), ("scheduler.policy_options.passing_share=0.9", False)],
)
def test_the_policy_says_who_is_next(tmp_path: Path, policy: str, is_long_first: bool) -> None:
    """First come, first served: the long one, and nobody before it. `kvasir`: all short ones. With either,
    whoever has a lower priority is next, though it was the last to ask."""
    flags = ("--engine", "simulated")
    with running_stack(tmp_path / "run", workers=1, settings=(*SETTINGS, policy), flags=flags) as stack:
        begun = asyncio.run(order_of_starts(stack))
        assert begun[0] == "filling"
        assert begun.index("long") == (1 if is_long_first else SHORTS + 1), begun
        begun = asyncio.run(order_of_starts(stack, priority=-1))
        assert begun[:2] == ["filling", f"short {SHORTS - 1}"], begun
