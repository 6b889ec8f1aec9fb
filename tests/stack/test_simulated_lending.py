"""Simulated workers that lend each other KV: a prompt longer than one of them, as one big one answers it."""

import asyncio
import random
import signal

import httpx
import pytest

from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import passage
from tests.stack.running import RunningStack, running_stack
from tests.stack.small_workers import BLOCK_TOKENS, BLOCKS, OWN_TOKENS, SETTINGS, until_announced
from tests.stack.watch import Seen, debtor_of, nobody_owes, watching

pytestmark = pytest.mark.stack
FLAGS = ("--engine", "simulated")
SPEED = "worker.simulated.speed=2"
"""Answers take three seconds: long enough to see who lends, and to kill it."""


def question(seed: int) -> Question:
    """A prompt of about one and a half times what one worker holds."""
    fields = {"seed": seed, "max_tokens": 200, "ignore_eos": True}
    return Question(passage(int(1.5 * OWN_TOKENS / 1.19), random.Random(seed)), fields)


QUESTIONS = [question(1), question(2)]
ALL_LEND_TOKENS = 1.9 * (BLOCKS - 1) * BLOCK_TOKENS


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What one worker says that holds it all."""
    settings = ("worker.kv_blocks=400", "worker.simulated.speed=50", "worker.prefix_cache.enabled=false")
    folder = tmp_path_factory.mktemp("big") / "run"
    with running_stack(folder, workers=1, settings=settings, flags=FLAGS) as one:
        return asyncio.run(one.client().ask_all(QUESTIONS))


two = stack_of("two", workers=2, settings=(*SETTINGS, SPEED), flags=FLAGS)


async def test_a_prompt_longer_than_a_worker_is_answered(two: RunningStack, expected: list[Answer]) -> None:
    await until_announced(two, ALL_LEND_TOKENS)
    told: list[str] = []

    async def look() -> None:
        """While the answer is written: in `status` and /metrics."""
        async with watching(two) as watch:
            await watch.until(lambda seen: debtor_of(seen) is not None)
            seen: Seen = await watch.ask("worker", 2)
        debtor = debtor_of(seen)
        assert debtor is not None
        shown = await asyncio.to_thread(two.command, "status", debtor)
        assert "borrowed_blocks" in shown.stdout
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"{two.operator_url}/metrics")).text
        borrowed = f'kvasir_worker_kv_blocks{{place="borrowed",worker="{debtor}"}}'
        told.extend(line.split()[-1] for line in page.splitlines() if line.startswith(borrowed))

    (answer,) = await two.client().ask_all(QUESTIONS[:1], midway=look, after=5)
    assert_same([answer], expected[:1])
    assert told and float(told[0]) > 0
    async with watching(two) as watch:
        await watch.until(nobody_owes)


async def test_a_killed_creditor_costs_no_token(two: RunningStack, expected: list[Answer]) -> None:
    await until_announced(two, ALL_LEND_TOKENS)
    killed: list[str] = []

    async def strike() -> None:
        async with watching(two) as watch:
            await watch.until(lambda seen: debtor_of(seen) is not None)
            debtor = debtor_of(await watch.ask("worker", 2))
        killed.append("worker-1" if debtor == "worker-0" else "worker-0")
        two.signal(killed[0], signal.SIGKILL)

    (answer,) = await two.client().ask_all(QUESTIONS[1:2], midway=strike, after=10)
    assert_same([answer], expected[1:2])
    (debtor,) = {"worker-0", "worker-1"} - set(killed)
    assert "which lends KV, failed" in (two.run_dir / "logs" / f"{debtor}.log").read_text()
