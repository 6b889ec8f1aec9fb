"""KV in other workers' host memory, live: where no device has anything left to lend, the text is the same."""

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from services.worker.core.settings import HostAttention
from shared.messages.reports import WorkerReported
from tests.stack.client import Answer, Question
from tests.stack.prompts import passage
from tests.stack.running import RunningStack, running_stack
from tests.stack.small_workers import BLOCKS, OWN_TOKENS, SETTINGS, STAGED_BLOCKS, heartbeats
from tests.stack.watch import Seen, watching

pytestmark = pytest.mark.stack
WORKERS, HOST_BLOCKS = 3, 50
CAP_FRACTION = 0.1
MOST_LENT = int((BLOCKS - STAGED_BLOCKS) * CAP_FRACTION)
"""Of each device: far too little for what is asked."""
SHAPES = {1: (3.02, 24), 2: (2.02, 200)}
"""By seed: the prompt in workers' KV, the answer in tokens."""
OVERRIDDEN = ("worker.lending.max_lent_fraction=1.0",)


def questions() -> list[Question]:
    found = []
    for seed, (times, answer_tokens) in SHAPES.items():
        fields = {"max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
        found.append(Question(passage(int(times * OWN_TOKENS / 1.19), random.Random(seed)), fields))
    return found


@pytest.fixture(
    scope="module", params=[HostAttention.AUTO, pytest.param(HostAttention.FETCH, marks=pytest.mark.slow)]
)
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    settings = (
        *(each for each in SETTINGS if each not in OVERRIDDEN),
        f"worker.lending.max_lent_fraction={CAP_FRACTION}",
        f"worker.host_memory.blocks={2 * HOST_BLOCKS}",
        "worker.host_memory.lent_share=0.5",
        f"worker.lending.host_attention={request.param}",
    )
    folder = tmp_path_factory.mktemp(f"three-{request.param}") / "run"
    with running_stack(folder, workers=WORKERS, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def expected(roomy: RunningStack) -> list[Answer]:
    """What one worker says that holds it all."""
    return [asyncio.run(roomy.client().ask_all([question]))[0] for question in questions()]


def check_memory(report: WorkerReported) -> None:
    """Neither tier holds more than its worker has of it."""
    capacity = report.capacity
    own = capacity.total_blocks - capacity.borrowed_blocks
    used = own - (capacity.free_blocks - capacity.borrowed_free_blocks)
    lent = sum(report.lent_to_blocks.values())
    assert lent == capacity.lent_blocks <= MOST_LENT
    assert used + lent + STAGED_BLOCKS <= BLOCKS, f"more KV than {report.worker_id} has: {report}"
    assert sum(report.host_lent_to_blocks.values()) == capacity.host_lent_blocks <= HOST_BLOCKS
    borrowed = [*report.borrowed_from_blocks.values(), *report.host_borrowed_from_blocks.values()]
    assert sum(borrowed) == capacity.borrowed_blocks


async def until_nobody_owes(stack: RunningStack) -> None:
    async with watching(stack) as watch:
        await watch.until(lambda seen: len(seen) == WORKERS and not owed(seen), expected=WORKERS)


def owed(seen: Seen) -> int:
    return sum(int(row["lent_blocks"]) for row in seen.values())


async def test_a_prompt_of_three_workers_is_in_host_memory(
    three: RunningStack, expected: list[Answer]
) -> None:
    async with heartbeats(three) as heard:
        (answer,) = await three.client().ask_all(questions()[:1])
        await asyncio.sleep(0.5)
    assert answer.complete, f"{answer}\n{three.logs()}"
    assert answer.text == expected[0].text
    for report in heard.reports:
        check_memory(report)
    full = {
        report.worker_id
        for report in heard.reports
        if report.capacity.host_lent_blocks and report.capacity.lent_blocks == MOST_LENT
    }
    assert len(full) == WORKERS - 1, f"devices first, as far as they lend: {full}"
    needed = 3 * OWN_TOKENS // 16 - BLOCKS - (WORKERS - 1) * MOST_LENT
    assert max(sum(r.host_borrowed_from_blocks.values()) for r in heard.reports) >= needed
    await until_nobody_owes(three)


@pytest.mark.slow  # test_distattention has the same of devices in every run
async def test_a_killed_creditor_of_host_memory(three: RunningStack, expected: list[Answer]) -> None:
    killed: list[str] = []

    async def strike() -> None:
        async with watching(three) as watch:
            seen: Seen = {}
            while len(seen) < WORKERS or not any(row["host_lent_blocks"] for row in seen.values()):
                seen = await watch.ask("worker", WORKERS)
        killed.append(max(seen, key=lambda name: int(seen[name]["host_lent_blocks"])))
        three.signal(killed[0], signal.SIGKILL)

    (answer,) = await three.client().ask_all(questions()[1:], midway=strike, after=10)
    assert killed
    assert answer.complete, f"{answer}\n{three.logs()}"
    assert answer.text == expected[1].text
    await until_nobody_owes(three)
