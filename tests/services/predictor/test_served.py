"""Several served models: each learns from its own answers, keeps them apart on disk, and is told apart."""

import asyncio
from pathlib import Path

import pytest

from services.predictor.config import PredictorConfig
from services.predictor.core.length_model import LengthQuery, LengthSample
from services.predictor.learning import SAMPLES_FILE
from services.predictor.models.network import Ensemble
from services.predictor.models.versions import write
from services.predictor.samples import read_samples
from services.predictor.served import MOST_MODELS, ServedLengths, ServedModels, folder_of
from services.predictor.service import HANDLERS, Predictor
from shared import subjects
from shared.errors import NoResponder
from shared.messages.base import Empty
from shared.messages.commands import LengthPrediction, PredictLength
from shared.messages.reports import SequenceFinished, ServiceStatus
from shared.messages.sequence import FinishReason, SequenceRef, pack_tokens
from tests.conftest import ConnectBus
from tests.tasks import running

PROMPT = pack_tokens(range(20))


def ref(number: int) -> SequenceRef:
    return SequenceRef(request_id=f"req_{number}", choice=0, attempt=1)


async def test_one_model_learns_nothing_from_the_answers_of_another(connect_bus: ConnectBus) -> None:
    bus, client = await connect_bus("predictor", "predictor-0"), await connect_bus("gateway", "gateway-0")
    served = ServedModels(PredictorConfig())
    await bus.attach(HANDLERS, Predictor(bus, served))

    async def asked(model: str) -> LengthPrediction:
        question = PredictLength(ref=ref(0), prompt=PROMPT, max_tokens=1000, model=model)
        return await client.request(subjects.PREDICTOR_PREDICT, question, LengthPrediction, deadline_s=5.0)

    async with running(served.run()):
        for number in range(300):
            for model, tokens in (("short", 12), ("long", 600)):
                over = SequenceFinished(
                    ref=ref(number),
                    prompt=PROMPT,
                    output_tokens=tokens,
                    finish_reason=FinishReason.STOP,
                    max_tokens=1000,
                    model=model,
                )
                await client.publish(subjects.GATEWAY_FINISHED, over)
        async with asyncio.timeout(30):
            while (await asked("long")).model_version != "histogram-300":
                await asyncio.sleep(0.01)
        short, long, neither = await asked("short"), await asked("long"), await asked("")
        (status,) = await client.gather(
            subjects.status("predictor"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
        )
    assert short.p90_tokens == 12 and long.p50_tokens > 500
    assert neither.model_version == "histogram-0"
    told = {row["model"]: row for row in status.details["models"]}
    assert {name: row["finished"] for name, row in told.items()} == {"short": 300, "long": 300}
    assert status.details["finished"] == 600


async def test_who_names_no_model_means_the_only_one() -> None:
    served = ServedModels(PredictorConfig())
    assert served.of("") is served.common
    only = served.of("only")
    assert served.of("") is only is not served.common
    assert "models" not in served.summary()
    served.of("other")
    assert served.of("") is served.common


async def test_a_model_that_is_first_named_at_the_end_is_nobody_s_fault() -> None:
    """It was begun in a group of tasks that was over."""
    served = ServedModels(PredictorConfig())
    async with running(served.run()):
        await asyncio.sleep(0.05)
        assert served.of("known") is not served.common
    assert served.of("new") is served.common
    with pytest.raises(NoResponder):
        await served.of("new").batcher.predict(LengthQuery(PROMPT, 10))


async def test_there_are_only_so_many() -> None:
    served = ServedModels(PredictorConfig())
    made = {id(served.of(f"m{number}")) for number in range(MOST_MODELS)}
    assert len(made) == MOST_MODELS and id(served.common) not in made
    assert served.of("one more") is served.common


@pytest.mark.parametrize("model", ["constant", "histogram"])
async def test_what_learns_nothing_is_shared(model: str) -> None:
    served = ServedModels(PredictorConfig(model=model))
    first, second = served.of("a"), served.of("b")
    assert (first.batcher is second.batcher) == (model == "constant")
    assert first.audit is not second.audit
    async with running(served.run()):
        predicted = await asyncio.gather(
            *(one.batcher.predict(LengthQuery(PROMPT, 100)) for one in (first, second, served.of("c")))
        )
    assert len(predicted) == 3


async def test_each_keeps_what_it_learned_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """And begins with what `train` left for all, until it has a version of its own."""
    write(tmp_path, Ensemble(1), {})
    write(tmp_path / folder_of("b/B"), Ensemble(1), {})
    write(tmp_path / folder_of("b/B"), Ensemble(1), {})
    served = ServedModels(PredictorConfig(model="regressor", state_dir=tmp_path))

    def versions() -> list[str]:
        return [one.batcher.model.version for one in (served.of("a"), served.of("b/B"))]

    assert versions() == ["regressor-1", "regressor-2"]
    async with running(served.run()):
        for at, name in enumerate(("a", "b/B")):
            lengths: ServedLengths = served.of(name)
            assert lengths.learner is not None
            lengths.learner.observe(LengthSample(PROMPT, 10 + at, False))
            await lengths.batcher.predict(LengthQuery(PROMPT, 100))
    for at, name in enumerate(("a", "b/B")):
        (kept,) = read_samples(tmp_path / folder_of(name) / SAMPLES_FILE)
        assert kept.output_tokens == 10 + at
    assert folder_of("b/B") != folder_of("b-B") and "/" not in folder_of("../x")
