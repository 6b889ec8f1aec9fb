"""Questions in batches: one call at a time, bounded, in order with what is learned."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from services.predictor.batching import Batcher
from services.predictor.core.length_model import LengthQuery, LengthSample, PredictedLength
from shared.errors import NoResponder, Overloaded, PolicyFailed
from tests.patience import PATIENCE_S
from tests.tasks import running


class Gated:
    """Says how many samples it has seen; while `gate` is shut a call takes its time."""

    name = version = "gated"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sizes: list[int] = []
        self.seen = 0
        self.threads: set[int] = set()
        self.fails = False

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        raise AssertionError("it is asked in batches")

    def predict_batch(self, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
        assert self.gate.wait(10.0)
        self.threads.add(threading.get_ident())
        self.sizes.append(len(queries))
        if self.fails:
            raise RuntimeError("broken")
        return [PredictedLength(self.seen, *(query.max_tokens for _ in range(4))) for query in queries]

    def observe(self, sample: LengthSample) -> None:
        self.threads.add(threading.get_ident())
        self.seen += 1


def query(number: int) -> LengthQuery:
    return LengthQuery(b"", number)


async def test_questions_asked_during_a_call_make_one_batch_and_get_their_own_answers() -> None:
    model = Gated()
    batcher = Batcher(model, batch_limit=8)
    async with running(batcher.run()):
        model.gate.clear()
        first = asyncio.create_task(batcher.predict(query(0)))
        await asyncio.sleep(0.05)
        rest = [asyncio.create_task(batcher.predict(query(number))) for number in range(1, 12)]
        await asyncio.sleep(0.05)
        assert not first.done()
        model.gate.set()
        told = await asyncio.gather(first, *rest)
    assert [answer.p50_tokens for answer in told] == list(range(12))
    assert model.sizes == [1, 8, 3] and batcher.batches == 3
    assert len(model.threads) == 1 and threading.get_ident() not in model.threads


async def test_what_was_learned_before_a_question_is_known_to_its_answer() -> None:
    model = Gated()
    batcher = Batcher(model)
    changed: list[int] = []
    async with running(batcher.run()):
        for _ in range(5):
            batcher.observe(LengthSample(b"", 1, censored=False))
        batcher.call(lambda: changed.append(threading.get_ident()))
        assert (await batcher.predict(query(1))).rl_tokens == 5
    assert set(changed) == model.threads


async def test_one_question_too_many_is_refused_at_once() -> None:
    model = Gated()
    batcher = Batcher(model, batch_limit=1, queue_limit=2)
    async with running(batcher.run()):
        model.gate.clear()
        waiting = [asyncio.create_task(batcher.predict(query(0)))]
        await asyncio.sleep(0.05)
        waiting += [asyncio.create_task(batcher.predict(query(number))) for number in (1, 2)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await batcher.predict(query(3))
        model.gate.set()
        assert [answer.p50_tokens for answer in await asyncio.gather(*waiting)] == [0, 1, 2]


async def test_a_model_that_fails_is_an_error_of_that_batch_only() -> None:
    model = Gated()
    batcher = Batcher(model)
    async with running(batcher.run()):
        model.fails = True
        with pytest.raises(PolicyFailed, match="RuntimeError: broken"):
            await batcher.predict(query(1))
        model.fails = False
        assert (await batcher.predict(query(2))).p50_tokens == 2


async def test_questions_that_are_open_at_the_end_are_told_so() -> None:
    """They were cancelled, though nobody had cancelled them: an error in the log at each orderly end."""
    model = Gated()
    batcher = Batcher(model, batch_limit=1)
    async with running(batcher.run()):
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.predict(query(number))) for number in (1, 2)]
        await asyncio.sleep(0.05)
    model.gate.set()
    answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(answer, NoResponder) for answer in answers)
    with pytest.raises(NoResponder):
        await asyncio.wait_for(batcher.predict(query(3)), PATIENCE_S)
