"""The predictor over a real bus."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from services.predictor.batching import Batcher
from services.predictor.config import PredictorConfig
from services.predictor.models import create
from services.predictor.served import ServedModels, learner_for
from services.predictor.service import HANDLERS, Predictor, run
from shared import subjects
from shared.bus import Bus, Endpoint
from shared.config import BusConfig
from shared.errors import InvalidRequest, NoResponder
from shared.messages.base import Empty
from shared.messages.commands import LengthPrediction, PredictLength
from shared.messages.reports import SequenceFinished, ServiceStatus
from shared.messages.sequence import FinishReason, SequenceRef, pack_tokens
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.scheduler.bus_peers import PredictorOnBus
from tests.services.scheduler.bus_stack import BusStack
from tests.tasks import running

PROMPT = pack_tokens(range(20))


def ref(number: int) -> SequenceRef:
    return SequenceRef(request_id=f"req_{number}", choice=0, attempt=1)


@asynccontextmanager
async def serving(bus: Bus, model: str = "histogram") -> AsyncIterator[Batcher]:
    served = ServedModels(PredictorConfig(model=model))
    await bus.attach(HANDLERS, Predictor(bus, served))
    async with running(served.run()):
        yield served.common.batcher


async def ask(client: Bus, number: int, max_tokens: int = 1000, prompt: bytes = PROMPT) -> LengthPrediction:
    question = PredictLength(ref=ref(number), prompt=prompt, max_tokens=max_tokens)
    return await client.request(subjects.PREDICTOR_PREDICT, question, LengthPrediction, deadline_s=5.0)


async def test_answers_learns_and_says_what_it_knows(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("predictor", "predictor-0")
    client = await connect_bus("gateway", "gateway-0")
    async with serving(bus):
        before = await ask(client, 0)
        assert before.model_version == "histogram-0"
        for number in range(200):
            reason = FinishReason.CANCELLED if number % 10 == 9 else FinishReason.STOP
            length = 900 if reason is FinishReason.CANCELLED else 12
            over = SequenceFinished(
                ref=ref(number), prompt=PROMPT, output_tokens=length, finish_reason=reason, max_tokens=1000
            )
            await client.publish(subjects.GATEWAY_FINISHED, over)
        for _ in range(500):
            after = await ask(client, 1000)
            if after.model_version == "histogram-180":
                break
            await asyncio.sleep(0.01)
        assert after.p90_tokens == 12
        (status,) = await client.gather(
            subjects.status("predictor"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
        )
        assert status.details["model_version"] == "histogram-180"
        assert status.details["finished"] == 180
        assert status.details["scored"] == 1
        assert status.details["mae_tokens"] == before.p50_tokens - 12


async def test_bad_questions_are_refused_with_their_reason(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("predictor", "predictor-0")
    client = await connect_bus("gateway", "gateway-0")
    async with serving(bus):
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await ask(client, 1, max_tokens=0)


async def test_concurrent_questions_share_calls_of_the_model(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("predictor", "predictor-0")
    client = await connect_bus("gateway", "gateway-0")
    async with serving(bus, "constant") as batcher:
        told = await asyncio.gather(*(ask(client, number) for number in range(200)))
    assert {answer.p50_tokens for answer in told} == {128}
    assert batcher.batches < 200


async def test_it_runs_until_cancelled_and_only_a_regressor_learns(
    bus_config: BusConfig, connect_bus: ConnectBus, tmp_path: Path
) -> None:
    config = PredictorConfig(bus=bus_config, model="regressor", state_dir=tmp_path, learn_every=100)
    client = await connect_bus("gateway", "gateway-0")
    async with running(run(config)):
        async with asyncio.timeout(20.0):
            while True:
                try:
                    answer = await ask(client, 1)
                    break
                except NoResponder:
                    await asyncio.sleep(0.05)
        assert answer.model_version == "histogram-0"
        (status,) = await client.gather(
            subjects.status("predictor"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
        )
        assert (status.details["model"], status.details["learned_from"]) == ("regressor", 0)
    plain = PredictorConfig(bus=bus_config, state_dir=tmp_path)
    assert learner_for(plain, Batcher(create("histogram")), tmp_path) is None


class Hanging(PredictorOnBus):
    """Never answers in time."""

    async def predict(self, command: PredictLength) -> LengthPrediction:
        await asyncio.sleep(30.0)
        return await super().predict(command)


class Lying(PredictorOnBus):
    """Says what no length can be."""

    LIES = (-5, 0, 10**12)

    async def predict(self, command: PredictLength) -> LengthPrediction:
        self.asked.append(command)
        lie = self.LIES[len(self.asked) % len(self.LIES)]
        return LengthPrediction(
            rl_tokens=lie, p50_tokens=lie, p80_tokens=-lie, p90_tokens=lie, p95_tokens=0, model_version=""
        )


class Failing(PredictorOnBus):
    """Breaks on every question."""

    async def predict(self, command: PredictLength) -> LengthPrediction:
        raise ZeroDivisionError


@pytest_asyncio.fixture
async def stack(connect_bus: ConnectBus, bus_config: BusConfig) -> BusStack:
    stack = BusStack(connect_bus, bus_config)
    await stack.start()
    return stack


@pytest.mark.parametrize("policy", ["vllm", "srtf", "multires", "sync_coupled"])
@pytest.mark.parametrize("peer", [None, Hanging, Lying, Failing])
async def test_a_predictor_that_is_down_slow_or_wrong_holds_up_no_request(
    stack: BusStack, peer: type[PredictorOnBus] | None, policy: str
) -> None:
    await stack.peers.detach(PredictorOnBus.HANDLERS)
    if peer is not None:
        endpoint = Endpoint(subjects.PREDICTOR_PREDICT, PredictLength, "predict")
        await stack.peers.attach((endpoint,), peer())
    worker, scheduler = await stack.worker(), await stack.scheduler(policy=policy)
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        names = [f"r{number}" for number in range(8)]
        await asyncio.gather(*(stack.reader.submit(stack.reader.spec(name)) for name in names))
        await until(lambda: set(stack.reader.ended) == set(names))
        assert set(stack.reader.ended.values()) == {1}
