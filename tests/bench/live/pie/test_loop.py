"""The loop: real cores, engine and copies; text, capacity and blocks while Pie grows and shrinks."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from bench.live.pie.loop import Loop, Request
from services.scheduler.policy.contract import PolicySettings
from services.scheduler.policy.first_come import VllmPolicy
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.pie.settings import PieSettings
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.pie.conftest import LAYERS, llama

__all__ = ["llama"]
REQUESTS = 24
DEVICE_BLOCKS = 24


def requests() -> Iterator[Request]:
    dice = random.Random(4)
    for _ in range(REQUESTS):
        prompt = tuple(dice.randrange(3, VOCABULARY) for _ in range(dice.randrange(1, 30)))
        yield Request(prompt, dice.randrange(2, 40))


def make_loop(model: Any, **settings: Any) -> Loop:
    pie = PieSettings(enabled=bool(settings), notice_s=0.05, **settings)
    engine = TorchEngine(describe(model), kv_blocks=DEVICE_BLOCKS, block_tokens=4, pie=pie)
    return Loop(engine, requests(), clients=10, settings=PolicySettings(max_batch_sequences=16))


def texts(loop: Loop) -> list[list[int]]:
    assert all(each.reason == "length" for each in loop.answers)
    return [each.tokens for each in sorted(loop.answers, key=lambda each: each.index)]


def finish(loop: Loop) -> None:
    loop.run(60.0, until=lambda: len(loop.answers) == REQUESTS)
    loop.check_integrity()


@pytest.fixture(scope="module")
def expected(llama: Any) -> list[list[int]]:
    plain = make_loop(llama)
    finish(plain)
    assert plain.resyncs == 1 and len(plain.answers) == REQUESTS
    assert [len(each) for each in texts(plain)] == [each.max_tokens for each in requests()]
    return texts(plain)


@pytest.mark.parametrize("settings", [{"expansion": "fixed", "fifo_layers": 5}, {"window_iterations": 4}])
def test_the_text_is_the_same_under_the_schedulers_plans(
    llama: Any, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    loop = make_loop(llama, **settings)
    assert loop.engine.pie is not None
    finish(loop)
    assert texts(loop) == expected
    loop.engine.pie.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_scheduler_follows_the_capacity_and_no_block_is_lost(
    llama: Any, expected: list[list[int]], seed: int
) -> None:
    """Grows and shrinks under load: heartbeats tell, the next plans hold, what is doomed moves at once."""
    loop, dice = make_loop(llama, window_iterations=10_000), random.Random(seed)
    pie = loop.engine.pie
    assert pie is not None
    seen: set[int] = set()
    wanted = [0]
    while len(loop.answers) < REQUESTS:
        if not pie.is_resizing:
            wanted.append(dice.choice([0, 3, 4, LAYERS - 1]))
            pie.want(wanted[-1])
        steps = loop.steps + dice.randrange(1, 12)
        loop.run(5.0, until=lambda steps=steps: loop.steps >= steps or len(loop.answers) == REQUESTS)  # type: ignore[misc]
        loop.beat()
        policy = loop._scheduler._roster.pipelines["worker-0"].policy
        assert policy is not None and isinstance(policy.inner, VllmPolicy)
        assert policy.inner._table.capacity_blocks == pie.capacity_blocks
        loop.check_integrity()
        pie.kv.residency.check_integrity()
        seen.add(pie.capacity_blocks)
    assert texts(loop) == expected
    changes = sum(before != after for before, after in pairwise(wanted))
    assert len(seen) >= 2, "it has grown; how often depends on how long a change takes"
    assert loop.resyncs <= 1 + changes, "plans run into changes that no heartbeat has told, only"
    pie.close()


def test_clients_join_one_after_the_other(llama: Any) -> None:
    engine = TorchEngine(describe(llama), kv_blocks=DEVICE_BLOCKS, block_tokens=4)
    settings = PolicySettings(max_batch_sequences=16)
    loop = Loop(engine, requests(), clients=10, settings=settings, ramp_s=20.0)
    loop.run(0.02)
    assert len(loop._open) <= 1
    loop.ran_s = 10.0
    loop.run(0.001)
    assert 4 <= len(loop._open) <= 6
    loop.ran_s = 20.0
    finish(loop)
