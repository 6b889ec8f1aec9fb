"""Learning from what was served: samples in files, versions in a folder, and the commands for both."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.predictor.command import main
from services.predictor.config import PredictorConfig
from services.predictor.core.length_model import LengthQuery, LengthSample, ModelSettings
from services.predictor.core.report import evaluate
from services.predictor.learning import SAMPLES_FILE, Learner
from services.predictor.models import ConstantModel, create, regressor
from services.predictor.models.regressor import RegressorModel
from services.predictor.models.training import TrainingPlan, hold_trial
from services.predictor.revising import MOST_PENDING, Reviser
from services.predictor.samples import load_tokenizer, read_samples, write_samples, write_whole
from services.predictor.service import HANDLERS, Batcher, Predictor, ServedModels
from shared import subjects
from shared.bus import Listener
from shared.errors import ConfigError, InvalidRequest
from shared.messages.lengths import AnswerState, LengthsRevised, RevisedLength, WorkerObserved
from shared.messages.reports import SequenceFinished
from shared.messages.sequence import FinishReason, pack_tokens, unpack_tokens
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.predictor.lengths import LONG_TOKENS, SHORT_TOKENS, samples_of
from tests.shared.messages.builders import ref
from tests.tasks import running


@asynccontextmanager
async def learner_in(
    directory: Path, every: int = 300, least: int = 300, history: int = 2000
) -> AsyncIterator[tuple[Learner, Batcher]]:
    model = RegressorModel.from_settings(ModelSettings(state_dir=directory))
    batcher = Batcher(model)
    learner = Learner(model, batcher.call, directory, every, least, history)
    async with running(batcher.run(), learner.run()):
        yield learner, batcher


async def test_it_learns_swaps_once_better_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    samples = samples_of(340)
    async with learner_in(tmp_path) as (learner, batcher):
        for sample in samples[:300]:
            learner.observe(sample)
            batcher.observe(sample)
        longest_s = 0.0
        clock = asyncio.get_running_loop().time
        while not (learner.swaps or learner.failures):
            begin_s = clock()
            told = await batcher.predict(LengthQuery(samples[0].prompt, 1000))
            longest_s = max(longest_s, clock() - begin_s)
            await asyncio.sleep(0.01)
        assert learner.failures == 0 and longest_s < 5.0, "predictions went on meanwhile"
        await until(lambda: learner.model.trained is not None, within_s=250.0)
        short = await batcher.predict(LengthQuery(samples[0].prompt, 1000))
        long = await batcher.predict(LengthQuery(samples[1].prompt, 1000))
        assert abs(short.p50_tokens - SHORT_TOKENS) < 10 < 50 > abs(long.p50_tokens - LONG_TOKENS)
        assert told is not None
        summary = learner.summary()
        assert summary["swaps"] == summary["trainings"] == 1 and not summary["training"]
        assert summary["new_mae_tokens"] < summary["old_mae_tokens"]
        for sample in samples[300:]:
            learner.observe(sample)
    assert read_samples(tmp_path / SAMPLES_FILE) == samples
    async with learner_in(tmp_path) as (again, _):
        assert again.model.version == "regressor-1" and again.summary()["learned_from"] == 340


async def test_a_training_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with learner_in(tmp_path, 20, 20) as (learner, batcher):
        for sample in samples_of(20):
            learner.observe(sample)
        await until(lambda: learner.failures > 0, within_s=250.0)
        assert learner.model.trained is None and learner.swaps == 0
        answer = await batcher.predict(LengthQuery(b"", 1000))
        assert answer.p50_tokens > 0


async def test_history_is_bounded_and_a_damaged_file_of_it_is_none(tmp_path: Path) -> None:
    (tmp_path / SAMPLES_FILE).write_text("{half a row")
    async with learner_in(tmp_path, 10_000, history=150) as (learner, _):
        assert learner.summary()["learned_from"] == 0
        for sample in samples_of(200):
            learner.observe(sample)
        assert learner.summary()["learned_from"] == 150


TINY_CHAT = Path(__file__).parents[3] / "models" / "tiny_chat"


def file_of(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    samples = [LengthSample(pack_tokens([1, 2, 70_000]), 9, censored=False)]
    samples.append(LengthSample(pack_tokens([]), 300, censored=True))
    write_samples(tmp_path / "a.jsonl", samples)
    assert read_samples(tmp_path / "a.jsonl") == samples


def test_text_is_tokenized_and_answers_count_their_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TINY_CHAT)
    path = file_of(
        tmp_path,
        {"prompt": "Tell me a story.", "length": 50},
        {"prompt": "Tell me a story.", "response": "Once upon a time."},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        "",
        {"prompt_ids": [5], "response_ids": [1, 2, 3]},
    )
    text, answered, alpaca, ids = read_samples(path, tokenizer)
    assert tokenizer.decode(unpack_tokens(text.prompt)) == "Tell me a story." and text.output_tokens == 50
    written = tokenizer.encode("Once upon a time.", add_special_tokens=False).ids
    assert answered.output_tokens == len(written) + 1
    assert tokenizer.decode(unpack_tokens(alpaca.prompt)) == "Add.\n1 2" and ids.output_tokens == 3


@pytest.mark.parametrize(
    "row",
    [
        "no JSON",
        [1],
        {"length": 3},
        {"prompt": "text without a tokenizer", "length": 3},
        {"prompt_ids": [1], "length": 0},
        {"prompt_ids": [-1], "length": 3},
        {"prompt_ids": [1]},
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: Any) -> None:
    path = file_of(tmp_path, {"prompt_ids": [1], "length": 3}, row)
    with pytest.raises(InvalidRequest, match=r"rows\.jsonl, line 2"):
        read_samples(path)


def test_files_that_are_not_there_are_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"none")
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


ROOT = Path(__file__).parents[3]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    write_samples(path, samples_of(300))
    return path


def test_train_writes_for_evaluate(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "versions"
    assert main(["train", "--data", str(data), "--out", str(out), "--held-out", "60"]) == 0
    shown = capsys.readouterr().out
    assert "histogram" in shown and "within_50_share" in shown and "regressor-000001" in shown
    assert main(["evaluate", "--data", str(data), "--state-dir", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["version"] == "regressor-1" and figures["scored"] == 300
    assert main(["evaluate", "--model", "histogram", "--data", str(data)]) == 0
    assert "mae_tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--held-out", "300"], "held-out"),
        (["--held-out", "270"], "at least 50"),
        (["--deadline-s", "0"], "stopped"),
    ],
)
def test_what_cannot_be_done_is_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["train", "--data", str(data), "--out", str(tmp_path / "v"), *arguments]) == 1
    assert told in capsys.readouterr().err


def test_in_the_background_it_ends_with_whoever_asked(data: Path, tmp_path: Path) -> None:
    stranger = str(os.getpid() + 1_000_000)
    command = [sys.executable, "-m", "services.predictor", "train", "--data", str(data)]
    command += ["--out", str(tmp_path / "v"), "--background", stranger]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "stopped" in done.stderr and regressor.paths(tmp_path / "v") == []


PLAN = TrainingPlan(members=1, epochs=4, min_steps=60)


def test_only_a_version_that_beats_the_old_one_is_written(tmp_path: Path) -> None:
    samples = samples_of(400)
    first = hold_trial(samples, tmp_path, PLAN, held_out=100, only_if_better=True)
    assert first.old is not None and first.new is not None and first.path is not None
    assert first.old_version.startswith("histogram") and first.is_better
    assert first.new.mae_tokens < 0.5 * first.old.mae_tokens
    written = regressor.latest(tmp_path)
    assert written is not None and written.version == "regressor-1"
    assert written.report["held_out"]["mae_tokens"] == round(first.new.mae_tokens, 3)
    opposite = [replace(one, output_tokens=220 - min(one.output_tokens, 219)) for one in samples[:300]]
    worse = hold_trial([*opposite, *samples[300:]], tmp_path, PLAN, held_out=100, only_if_better=True)
    assert worse.old_version == "regressor-1" and not worse.is_better and worse.path is None
    assert [path.name for path in regressor.paths(tmp_path)] == ["regressor-000001.safetensors"]


def test_answers_cut_by_their_limit_are_not_compared() -> None:
    samples = [replace(sample, output_tokens=5, censored=True) for sample in samples_of(10)]
    assert evaluate(ConstantModel(), samples) is None
    report = evaluate(ConstantModel(30), [*samples, *samples_of(2, noise=0.0)])
    assert report is not None and (report.scored, report.mae_tokens) == (2, 90.0)


WIDTH = 8


def observed(number: int, generated: int, rest: int) -> WorkerObserved:
    """Its state tells what is left."""
    state = np.zeros(WIDTH, np.float16)
    state[0] = np.log(rest)
    counts: dict[str, Any] = {"prompt_tokens": 9, "generated_tokens": generated, "max_tokens": 900}
    one = AnswerState(ref=ref(f"req_{number}"), state=state.tobytes(), **counts)
    return WorkerObserved(worker_id="worker-0", incarnation=1, model="m", states=(one,))


def finished(number: int, tokens: int, reason: FinishReason = FinishReason.STOP) -> SequenceFinished:
    return SequenceFinished(
        ref=ref(f"req_{number}"),
        prompt=pack_tokens(range(9)),
        output_tokens=tokens,
        finish_reason=reason,
        max_tokens=900,
    )


class Hearing:
    """The scheduler's side."""

    HANDLERS = (
        Listener(subjects.ANY_PREDICTOR_REVISED, LengthsRevised, "on_revised", sender="predictor_id"),
    )

    def __init__(self) -> None:
        self.told: list[LengthsRevised] = []

    def on_revised(self, event: LengthsRevised) -> None:
        self.told.append(event)


async def test_lengths_are_revised_once_states_tell_more_than_the_histogram(connect_bus: ConnectBus) -> None:
    predictor = await connect_bus("predictor", "predictor-0")
    worker, gateway = await connect_bus("worker", "worker-0"), await connect_bus("gateway", "gateway-0")
    scheduler, hearing = await connect_bus("scheduler", "scheduler-0"), Hearing()
    await scheduler.attach(Hearing.HANDLERS, hearing)
    served = ServedModels(PredictorConfig())
    reviser = Reviser(served.common.batcher.call, "distribution")
    service = Predictor(predictor, served, reviser=reviser)
    await predictor.attach(HANDLERS, service)
    random = np.random.default_rng(1)
    async with running(served.run(), service.tell()):
        for number in range(3000):
            if hearing.told and reviser.summary()["revised m"]["answers"] > 300:
                break
            length = int(random.exponential(90)) + 3
            for generated in range(1, length, 24):
                await worker.publish(
                    subjects.worker_observed("worker-0"), observed(number, generated, length - generated)
                )
            await gateway.publish(subjects.GATEWAY_FINISHED, finished(number, length))
            await asyncio.sleep(0.005)
        await worker.publish(subjects.worker_observed("worker-0"), observed(5000, 10, 400))
        await worker.publish(subjects.worker_observed("worker-0"), observed(5001, 10, 5))

        def last(number: int) -> list[RevisedLength]:
            return [one for event in hearing.told for one in event.lengths if one.ref == ref(f"req_{number}")]

        await until(lambda: last(5000) and last(5001))
    [long], [short] = last(5000), last(5001)
    assert long.generated_tokens == 10 and long.prediction.is_calibrated
    assert long.prediction.p50_tokens > 150 > 60 > short.prediction.p50_tokens > 10


async def test_what_was_learned_is_found_again(tmp_path: Path) -> None:
    batcher = Batcher(create("histogram"))
    reviser = Reviser(batcher.call, "rank", tmp_path)
    async with running(batcher.run()):
        for number in range(40):
            reviser.observe(observed(number, 1, 50 + number))
            await until(lambda: reviser._pending == 0)
            reviser.finish(ref(f"req_{number}").key, 51 + number, censored=False)
        reviser.observe(observed(99, 1, 70))
        reviser.forget(ref("req_99").key)
        await until(lambda: reviser.summary()["revised m"]["under_way"] == 0)
        reviser.save()
        again = Reviser(batcher.call, "rank", tmp_path)
        again.observe(observed(0, 1, 60))
        await until(lambda: again.summary().get("revised m", {}).get("answers") == 40)
        [file] = list(tmp_path.iterdir())  # noqa: ASYNC240 - a test's own
        file.write_bytes(b"not what was written")
        broken = Reviser(batcher.call, "rank", tmp_path)
        broken.observe(observed(0, 1, 60))
        await until(lambda: broken.summary().get("revised m", {}).get("answers") == 0)


async def test_of_a_flood_of_states_the_newest_are_dropped() -> None:
    batcher = Batcher(create("histogram"))  # nobody works it off
    reviser = Reviser(batcher.call, "distribution")
    for number in range(MOST_PENDING + 5):
        reviser.observe(observed(number, 1, 50))
    assert reviser.summary() == {"states_dropped": 5}
