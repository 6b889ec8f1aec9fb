"""Hidden states over a real bus: revised lengths come back, what was learned survives, a flood is dropped."""

import asyncio
from pathlib import Path

import numpy as np

from services.predictor.batching import Batcher
from services.predictor.config import PredictorConfig
from services.predictor.models import create
from services.predictor.revising import MOST_PENDING, Reviser
from services.predictor.service import HANDLERS, Predictor, ServedModels
from shared import subjects
from shared.bus import Listener
from shared.messages.lengths import AnswerState, LengthsRevised, RevisedLength, WorkerObserved
from shared.messages.reports import SequenceFinished
from shared.messages.sequence import FinishReason, pack_tokens
from tests.conftest import ConnectBus
from tests.patience import until
from tests.shared.messages.builders import ref
from tests.tasks import running

WIDTH = 8


def observed(number: int, generated: int, rest: int) -> WorkerObserved:
    """Its state tells what is left."""
    state = np.zeros(WIDTH, np.float16)
    state[0] = np.log(rest)
    one = AnswerState(
        ref=ref(f"req_{number}"),
        prompt_tokens=9,
        generated_tokens=generated,
        max_tokens=900,
        state=state.tobytes(),
    )
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
    reviser = Reviser(served.common.batcher, "distribution")
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
    assert long.generated_tokens == 10
    assert long.prediction.is_calibrated
    assert long.prediction.p50_tokens > 150 > 60 > short.prediction.p50_tokens > 10


async def test_what_was_learned_is_found_again(tmp_path: Path) -> None:
    batcher = Batcher(create("histogram"))
    reviser = Reviser(batcher, "rank", tmp_path)
    async with running(batcher.run()):
        for number in range(40):
            reviser.observe(observed(number, 1, 50 + number))
            await until(lambda: reviser._pending == 0)
            reviser.finish(ref(f"req_{number}").key, 51 + number, censored=False)
        reviser.observe(observed(99, 1, 70))
        reviser.forget(ref("req_99").key)
        await until(lambda: reviser.summary()["revised m"]["under_way"] == 0)
        reviser.save()
        again = Reviser(batcher, "rank", tmp_path)
        again.observe(observed(0, 1, 60))
        await until(lambda: again.summary().get("revised m", {}).get("answers") == 40)
        [file] = list(tmp_path.iterdir())  # noqa: ASYNC240 - a test's own
        file.write_bytes(b"not what was written")
        broken = Reviser(batcher, "rank", tmp_path)
        broken.observe(observed(0, 1, 60))
        await until(lambda: broken.summary().get("revised m", {}).get("answers") == 0)


async def test_of_a_flood_of_states_the_newest_are_dropped() -> None:
    batcher = Batcher(create("histogram"))  # nobody works it off
    reviser = Reviser(batcher, "distribution")
    for number in range(MOST_PENDING + 5):
        reviser.observe(observed(number, 1, 50))
    assert reviser.summary() == {"states_dropped": 5}
