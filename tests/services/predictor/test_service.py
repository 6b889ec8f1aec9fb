"""The predictor over a real bus: it predicts, learns per served model, and holds up no request."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.predictor.config import PredictorConfig
from services.predictor.core.length_model import LengthQuery, LengthSample, PredictedLength
from services.predictor.learning import SAMPLES_FILE
from services.predictor.models import create
from services.predictor.models.regressor import Ensemble, write
from services.predictor.samples import read_samples
from services.predictor.service import (
    HANDLERS,
    MOST_MODELS,
    Batcher,
    Predictor,
    ServedModels,
    folder_of,
    learner_for,
    run,
)
from shared import subjects
from shared.bus import Bus, Endpoint
from shared.config import BusConfig
from shared.errors import InvalidRequest, NoResponder, Overloaded, PolicyFailed
from shared.messages.base import Empty
from shared.messages.commands import LengthPrediction, PredictLength
from shared.messages.reports import SequenceFinished, ServiceStatus
from shared.messages.sequence import FinishReason, pack_tokens
from tests.conftest import ConnectBus
from tests.patience import PATIENCE_S, until
from tests.services.scheduler.bus_peers import PredictorOnBus
from tests.services.scheduler.bus_stack import BusStack
from tests.shared.messages.builders import ref
from tests.tasks import running

PROMPT = pack_tokens(range(20))


@asynccontextmanager
async def serving(bus: Bus, model: str = "histogram") -> AsyncIterator[ServedModels]:
    served = ServedModels(PredictorConfig(model=model))
    await bus.attach(HANDLERS, Predictor(bus, served))
    async with running(served.run()):
        yield served


async def ask(client: Bus, number: int = 0, max_tokens: int = 1000, model: str = "") -> LengthPrediction:
    question = PredictLength(ref=ref(f"req_{number}"), prompt=PROMPT, max_tokens=max_tokens, model=model)
    return await client.request(subjects.PREDICTOR_PREDICT, question, LengthPrediction, deadline_s=5.0)


async def finish(
    client: Bus, number: int, tokens: int, reason: FinishReason = FinishReason.STOP, model: str = ""
) -> None:
    over = SequenceFinished(
        ref=ref(f"req_{number}"),
        prompt=PROMPT,
        output_tokens=tokens,
        finish_reason=reason,
        max_tokens=1000,
        model=model,
    )
    await client.publish(subjects.GATEWAY_FINISHED, over)


async def status_of(client: Bus) -> ServiceStatus:
    (status,) = await client.gather(
        subjects.status("predictor"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
    )
    return status


async def test_it_answers_learns_and_shows_its_accuracy(connect_bus: ConnectBus) -> None:
    bus, client = await connect_bus("predictor", "predictor-0"), await connect_bus("gateway", "gateway-0")
    async with serving(bus):
        before = await ask(client)
        assert before.model_version == "histogram-0"
        for number in range(200):
            is_cancelled = number % 10 == 9
            reason = FinishReason.CANCELLED if is_cancelled else FinishReason.STOP
            await finish(client, number, 900 if is_cancelled else 12, reason)
        async with asyncio.timeout(30):
            while (after := await ask(client, 1000)).model_version != "histogram-180":
                await asyncio.sleep(0.01)
        assert after.p90_tokens == 12
        details = (await status_of(client)).details
        assert details["model_version"] == "histogram-180"
        assert (details["finished"], details["scored"]) == (180, 1)
        assert details["mae_tokens"] == before.p50_tokens - 12
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await ask(client, 1, max_tokens=0)


async def test_predictions_of_answers_that_were_cut_short_are_forgotten(connect_bus: ConnectBus) -> None:
    """Up to 10,000 of them stayed, which looked like a leak of 4 MB an hour."""
    bus, client = await connect_bus("predictor", "predictor-0"), await connect_bus("gateway", "gateway-0")
    async with serving(bus) as served:
        for number in range(20):
            await ask(client, number)
        assert len(served.common.audit._predicted) == 20
        for number in range(20):
            await finish(client, number, 3, FinishReason.CANCELLED)
        async with asyncio.timeout(30):
            while served.common.audit._predicted:
                await asyncio.sleep(0.01)


async def test_concurrent_questions_share_calls_of_the_model(connect_bus: ConnectBus) -> None:
    bus, client = await connect_bus("predictor", "predictor-0"), await connect_bus("gateway", "gateway-0")
    async with serving(bus, "constant") as served:
        told = await asyncio.gather(*(ask(client, number) for number in range(200)))
    assert {answer.p50_tokens for answer in told} == {128} and served.common.batcher.batches < 200


@pytest.mark.parametrize("rest_head", ["distribution", "none"])
async def test_only_a_regressor_learns(
    bus_config: BusConfig, connect_bus: ConnectBus, tmp_path: Path, rest_head: Any
) -> None:
    config = PredictorConfig(bus=bus_config, model="regressor", rest_head=rest_head, state_dir=tmp_path)
    client = await connect_bus("gateway", "gateway-0")
    async with running(run(config)), asyncio.timeout(20.0):
        while True:
            try:
                answer = await ask(client)
                break
            except NoResponder:
                await asyncio.sleep(0.05)
        assert answer.model_version == "histogram-0"
        details = (await status_of(client)).details
        assert (details["model"], details["learned_from"]) == ("regressor", 0)
    plain = PredictorConfig(bus=bus_config, state_dir=tmp_path)
    assert learner_for(plain, Batcher(create("histogram")), tmp_path) is None


async def test_a_served_model_learns_only_from_its_own_answers(connect_bus: ConnectBus) -> None:
    bus, client = await connect_bus("predictor", "predictor-0"), await connect_bus("gateway", "gateway-0")
    async with serving(bus):
        for number in range(300):
            for model, tokens in (("short", 12), ("long", 600)):
                await finish(client, number, tokens, model=model)
        async with asyncio.timeout(30):
            while (long := await ask(client, model="long")).model_version != "histogram-300":
                await asyncio.sleep(0.01)
        short, neither = await ask(client, model="short"), await ask(client)
        details = (await status_of(client)).details
    assert short.p90_tokens == 12 and long.p50_tokens > 500 and neither.model_version == "histogram-0"
    assert {row["model"]: row["finished"] for row in details["models"]} == {"short": 300, "long": 300}
    assert details["finished"] == 600


async def test_a_request_without_a_model_name_means_the_only_model() -> None:
    served = ServedModels(PredictorConfig())
    assert served.of("") is served.common
    only = served.of("only")
    assert served.of("") is only is not served.common and "models" not in served.summary()
    served.of("other")
    assert served.of("") is served.common
    for number in range(MOST_MODELS):
        served.of(f"m{number}")
    assert served.of("one more") is served.common


@pytest.mark.parametrize("model", ["constant", "histogram"])
async def test_models_that_do_not_learn_are_shared(model: str) -> None:
    served = ServedModels(PredictorConfig(model=model))
    first, second = served.of("a"), served.of("b")
    assert (first.batcher is second.batcher) == (model == "constant") and first.audit is not second.audit
    async with running(served.run()):
        predicted = await asyncio.gather(
            *(one.batcher.predict(LengthQuery(PROMPT, 100)) for one in (first, second, served.of("c")))
        )
    assert len(predicted) == 3


async def test_each_model_keeps_its_samples_in_its_own_folder(tmp_path: Path) -> None:
    """It starts from the version that `train` left for all, until it has its own."""
    write(tmp_path, Ensemble(1), {})
    write(tmp_path / folder_of("b/B"), Ensemble(1), {})
    write(tmp_path / folder_of("b/B"), Ensemble(1), {})
    served = ServedModels(PredictorConfig(model="regressor", state_dir=tmp_path))

    def versions() -> list[str]:
        return [one.batcher.model.version for one in (served.of("a"), served.of("b/B"))]

    assert versions() == ["regressor-1", "regressor-2"]
    async with running(served.run()):
        for at, name in enumerate(("a", "b/B")):
            lengths = served.of(name)
            assert lengths.learner is not None
            lengths.learner.observe(LengthSample(PROMPT, 10 + at, False))
            await lengths.batcher.predict(LengthQuery(PROMPT, 100))
    for at, name in enumerate(("a", "b/B")):
        (kept,) = read_samples(tmp_path / folder_of(name) / SAMPLES_FILE)
        assert kept.output_tokens == 10 + at
    assert folder_of("b/B") != folder_of("b-B") and "/" not in folder_of("../x")


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
