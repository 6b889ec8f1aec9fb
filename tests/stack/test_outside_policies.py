"""Policies from outside on real stacks: the examples of the docs, and those that raise."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.installed import EXAMPLES, KINDS, install_examples
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
    names = {
        kind: by_file[kind] if kind in ("policy", "eviction") else name for kind, name in installed.items()
    }
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
    with running_stack(tmp_path / "run", settings=settings, flags=SIMULATED) as stack:
        with ThreadPoolExecutor(4) as pool:
            running = long_ones(stack, pool)
            began_s = time.monotonic()
            answer = ask(stack, 33)
            took_s = time.monotonic() - began_s
            assert [one.result().status_code for one in running] == [others] * 2
        told = answer.json()["error"]["message"]
        assert answer.status_code == 503 and "ValueError: my own mistake (broken.py:" in told, told
        assert "placement.policy" in fallible or (took_s < 1.0 and fallible["scheduler.policy"] in told), told
        for where in fallible:
            assert "my own mistake" in stack.details(f"{where.partition('.')[0]}-0")["trouble"]
        assert "well: no" in stack.command("status").stdout
        assert stack.child("scheduler-0")["restarts"] == 0
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
