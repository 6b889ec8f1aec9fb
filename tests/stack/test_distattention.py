"""One request's KV on many workers, live: four small workers answer what one big worker answers."""

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from tests.stack.client import Answer, Question
from tests.stack.prompts import passage
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
BLOCKS, BLOCK_TOKENS, WORKERS = 40, 16, 4
OWN_TOKENS = BLOCKS * BLOCK_TOKENS
ANSWER_TOKENS = 24
SETTINGS = (
    f"worker.kv_blocks={BLOCKS}",
    "worker.prefix_cache.enabled=false",
    "worker.lending.borrow=true",
    "worker.lending.max_lent_fraction=1.0",
    "worker.lending.keep_free_fraction=0.0",
    "worker.lending.low_fraction=0.0",
    "worker.lending.high_fraction=0.0",
    "worker.lending.rest_s=0.1",
)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("four") / "run"
    with running_stack(folder, workers=WORKERS, settings=SETTINGS) as running:
        yield running


def long_question(seed: int, answer_tokens: int = ANSWER_TOKENS) -> Question:
    """A prompt of a little more than three times what one worker holds."""
    words = int(3.02 * OWN_TOKENS / 1.19)
    fields = {"max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
    return Question(passage(words, random.Random(seed)), fields)


async def prompt_tokens(stack: RunningStack, question: Question) -> int:
    import httpx

    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
        reply = await http.post(
            "/tokenize",
            json={"model": stack.model.name, "messages": [{"role": "user", "content": question.prompt}]},
            headers={"Authorization": f"Bearer {stack.key}"},
        )
        return int(reply.json()["count"])


def ask(stack: RunningStack, question: Question) -> Answer:
    return asyncio.run(stack.client().ask_all([question]))[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Answer]:
    """What one worker says that holds it all."""
    folder = tmp_path_factory.mktemp("one") / "run"
    settings = ("worker.kv_blocks=256", "worker.prefix_cache.enabled=false")
    with running_stack(folder, workers=1, settings=settings) as one:
        return {
            1: ask(one, long_question(1)),
            2: ask(one, long_question(2, 200)),
        }


def test_a_prompt_of_three_workers_kv_is_answered_by_four(
    four: RunningStack, expected: dict[int, Answer]
) -> None:
    assert asyncio.run(prompt_tokens(four, long_question(1))) >= 3 * OWN_TOKENS
    answer = ask(four, long_question(1))
    assert answer.complete, f"{answer}\n{four.logs()}"
    assert answer.text == expected[1].text
    assert answer.completion_tokens == ANSWER_TOKENS


def test_a_killed_creditor_costs_time_and_no_token(four: RunningStack, expected: dict[int, Answer]) -> None:
    names = [f"worker-{index}" for index in range(WORKERS)]
    killed: list[str] = []

    async def kill() -> None:
        details = {name: await asyncio.to_thread(four.details, name) for name in names}
        creditor = max(names, key=lambda name: int(details[name]["lent_blocks"]))
        assert details[creditor]["lent_blocks"] > 0
        killed.append(creditor)
        four.signal(creditor, signal.SIGKILL)

    (answer,) = asyncio.run(four.client().ask_all([long_question(2, 200)], midway=kill, after=10))
    assert killed
    assert answer.complete, f"{answer}\n{four.logs()}"
    assert answer.text == expected[2].text
