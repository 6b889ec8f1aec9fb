"""Stacks with vLLM workers, alone and beside native ones: the same texts, whoever computes them."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.live.migrate.mover import mover
from shared.messages.moves import MoveMode
from tests.patience import wait_until
from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import long_questions
from tests.stack.running import RunningStack, running_stack
from tests.stack.test_faults import order
from tests.stack.test_prefix_cache import Tenant, prompt_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]  # the first of a module waits for two stacks
MOVES = 25


def questions() -> list[Question]:
    """Long enough to be moved more than once."""
    return long_questions(12, least_tokens=240, step_tokens=4, longest_words=160, seed=5)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What a native worker answers."""
    with running_stack(tmp_path_factory.mktemp("native") / "run", workers=1) as stack:
        return asyncio.run(stack.client().ask_all(questions()))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("pair")
    settings = ("worker.prefix_cache.disk_mb=64", f"worker.prefix_cache.disk_path={folder / 'kv'}")
    with running_stack(folder / "run", settings=settings, flags=("--engine", "vllm")) as stack:
        yield stack


both = stack_of("both", settings=("worker-1.engine=vllm",))
"""worker-0 is native, worker-1 is vLLM's."""


async def test_answers_are_the_native_engines(pair: RunningStack, native: list[Answer]) -> None:
    assert_same(await pair.client().ask_all(questions()), native)


async def test_moved_by_kv(pair: RunningStack, native: list[Answer]) -> None:
    """Between two vLLM workers: blocks are fetched, nothing is computed again."""
    begun: list[int] = []
    async with mover(pair.run_dir, "kv") as moving:

        async def move() -> None:
            begun.append(await order(moving, MOVES))

        answers = await pair.client().ask_all(questions(), midway=move, after=60)
        await moving.until_over(begun[0], within_s=10)
    assert_same(answers, native)
    by_kv = [moved for moved in moving.done if moved.mode is MoveMode.KV and moved.moved_bytes]
    assert len(by_kv) >= MOVES // 4, (moving.outcomes, moving.refusals)


def test_a_restarted_worker_finds_its_disk(pair: RunningStack) -> None:
    tenant = Tenant(pair)
    prompt = prompt_of(8, 400)
    first = tenant.complete(prompt)
    restarts = [pair.child(name)["restarts"] for name in ("worker-0", "worker-1")]
    for name in ("worker-0", "worker-1"):
        pair.signal(name, signal.SIGTERM)
    for name, before in zip(("worker-0", "worker-1"), restarts, strict=True):
        pair.until_restarted(name, restarts=before + 1)
    wait_until(lambda: [row["sync"] for row in pair.details("scheduler-0")["workers"]] == 2 * ["in_step"])
    again = tenant.complete(prompt)
    tenant.close()
    assert (first.cached_tokens, again.cached_tokens) == (0, 384) and again.text == first.text
    tiers = [pair.details(name)["prefix_tiers"][2] for name in ("worker-0", "worker-1")]
    assert sum(tier["hits"] for tier in tiers) > 0 and sum(tier["faults"] for tier in tiers) == 0


async def test_a_killed_worker_leaves_no_child(pair: RunningStack) -> None:
    process = psutil.Process(int(pair.child("worker-0")["pid"]))
    family = [process, *process.children(recursive=True)]
    before = pair.child("worker-0")["restarts"]
    pair.signal("worker-0", signal.SIGKILL)
    await asyncio.to_thread(psutil.wait_procs, family, 20)
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    await asyncio.to_thread(pair.until_restarted, "worker-0", restarts=before + 1)


@pytest.mark.parametrize("mode", ["tokens", "kv"])
async def test_moved_between_kinds(both: RunningStack, native: list[Answer], mode: str) -> None:
    """As tokens, whatever was wished for: no block of one kind is another's."""
    begun: list[int] = []
    async with mover(both.run_dir, "tokens" if mode == "tokens" else "kv") as moving:

        async def move() -> None:
            begun.append(await order(moving, 12))

        answers = await both.client().ask_all(questions(), midway=move, after=60)
        await moving.until_over(begun[0], within_s=10)
    assert_same(answers, native)
    assert len(moving.done) >= 3, (moving.outcomes, moving.refusals)
    assert not [moved for moved in moving.done if moved.mode is MoveMode.KV and moved.moved_bytes]


@pytest.mark.parametrize("victim", ["worker-0", "worker-1"])
async def test_killed_beside_another_kind(both: RunningStack, native: list[Answer], victim: str) -> None:
    assert_same(await both.ask_and_kill(questions(), 200, victim), native)


def test_what_vllm_lacks_is_refused_at_start(tmp_path: Path) -> None:
    stack = RunningStack(tmp_path / "run")
    done: subprocess.CompletedProcess[str] = stack.command(
        "up", "--detach", "--port", str(stack.port), "--nats-port", "0", "--workers", "1", "--engine", "vllm",
        "--set", "worker.pie.enabled=true",
    )  # fmt: skip
    assert done.returncode == 2 and "leave out pie.enabled" in done.stderr
