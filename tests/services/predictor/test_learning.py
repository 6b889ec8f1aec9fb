"""Learning in the background, with a real training in a process of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.predictor.batching import Batcher
from services.predictor.core.length_model import LengthQuery, ModelSettings
from services.predictor.learning import SAMPLES_FILE, Learner
from services.predictor.models.regressor import RegressorModel
from services.predictor.samples import read_samples
from tests.patience import until
from tests.services.predictor.lengths import LONG_TOKENS, SHORT_TOKENS, samples_of
from tests.tasks import running


@asynccontextmanager
async def learner_in(
    directory: Path, every: int = 300, least: int = 300, history: int = 2000
) -> AsyncIterator[Learner]:
    model = RegressorModel.from_settings(ModelSettings(state_dir=directory))
    batcher = Batcher(model)
    learner = Learner(model, batcher, directory, every, least, history)
    async with running(batcher.run(), learner.run()):
        yield learner


async def test_it_learns_swaps_once_better_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    samples = samples_of(340)
    async with learner_in(tmp_path) as learner:
        for sample in samples[:300]:
            learner.observe(sample)
            learner.batcher.observe(sample)
        longest_s = 0.0
        clock = asyncio.get_running_loop().time
        while not (learner.swaps or learner.failures):
            begin_s = clock()
            told = await learner.batcher.predict(LengthQuery(samples[0].prompt, 1000))
            longest_s = max(longest_s, clock() - begin_s)
            await asyncio.sleep(0.01)
        assert learner.failures == 0 and longest_s < 5.0, "predictions went on meanwhile"
        await until(lambda: learner.model.trained is not None, within_s=250.0)
        short = await learner.batcher.predict(LengthQuery(samples[0].prompt, 1000))
        long = await learner.batcher.predict(LengthQuery(samples[1].prompt, 1000))
        assert abs(short.p50_tokens - SHORT_TOKENS) < 10 < 50 > abs(long.p50_tokens - LONG_TOKENS)
        assert told is not None
        summary = learner.summary()
        assert summary["swaps"] == summary["trainings"] == 1 and not summary["training"]
        assert summary["new_mae_tokens"] < summary["old_mae_tokens"]
        for sample in samples[300:]:
            learner.observe(sample)
    assert read_samples(tmp_path / SAMPLES_FILE) == samples
    async with learner_in(tmp_path) as again:
        assert again.model.version == "regressor-1"
        assert again.summary()["learned_from"] == 340


async def test_a_training_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with learner_in(tmp_path, 20, 20) as learner:
        for sample in samples_of(20):
            learner.observe(sample)
        await until(lambda: learner.failures > 0, within_s=250.0)
        assert learner.model.trained is None and learner.swaps == 0
        answer = await learner.batcher.predict(LengthQuery(b"", 1000))
        assert answer.p50_tokens > 0


async def test_history_is_bounded_and_a_damaged_file_of_it_is_none(tmp_path: Path) -> None:
    (tmp_path / SAMPLES_FILE).write_text("{half a row")
    async with learner_in(tmp_path, 10_000, history=150) as learner:
        assert learner.summary()["learned_from"] == 0
        for sample in samples_of(200):
            learner.observe(sample)
        assert learner.summary()["learned_from"] == 150
