"""A prompt longer than the KV of any one host is answered by four, over links of 10 Gbit/s."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer, Question
from tests.stack.hosts import Fleet, fleet
from tests.stack.judge import WITH_IDS, assert_as_good
from tests.stack.prompts import passage
from tests.stack.running import RunningStack
from tests.stack.small_workers import OWN_TOKENS
from tests.stack.small_workers import SETTINGS as SMALL
from tests.stack.test_hosts import LAYOUT, SETTINGS

pytestmark = [pytest.mark.stack, pytest.mark.slow]
NAMES = [f"worker-{number}" for number in range(len(LAYOUT))]


def answered(folder: Path, question: Question) -> Answer:
    """Return the answer of four hosts, at least two of which lend to the one that answers."""
    small = dict(setting.split("=") for setting in SMALL)
    small = {f"KVASIR_{name.upper().replace('.', '__')}": value for name, value in small.items()}
    with fleet(Fleet(folder, LAYOUT, SETTINGS | small)) as hosts:
        for host in hosts.hosts:
            host.limit("10gbit")
        most = dict.fromkeys(NAMES, 0)
        with hosts.asked(0, [question], 0) as answers:
            until_s = time.monotonic() + STACK_PATIENCE_S
            while sum(count > 0 for count in most.values()) < 2 and time.monotonic() < until_s:
                for name in NAMES:
                    most[name] = max(most[name], hosts.details(name).get("lent_blocks", 0))
        print(f"lent {most}, longest pause {answers[0].pause_s:.2f} s")
        assert answers[0].complete, f"{answers}\n{hosts.logs()}"
        assert sum(count > 0 for count in most.values()) >= 2, most
        return answers[0]


async def test_a_prompt_of_two_and_a_half_hosts(tmp_path: Path, roomy: RunningStack) -> None:
    fields = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, **WITH_IDS}
    question = Question(passage(int(2.5 * OWN_TOKENS / 1.19), random.Random(1)), fields)
    wanted = await roomy.client().ask_all([question])
    answer = await asyncio.to_thread(answered, tmp_path / "hosts", question)
    await assert_as_good(roomy, [answer], wanted)
