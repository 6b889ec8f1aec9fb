"""The predictor on the bus: answers `PredictLength` and learns from `SequenceFinished`.

If workers send hidden states of running answers (`WorkerObserved`), it publishes revised lengths. State is
soft: a restart begins with the latest trained version, or the prior.
"""

import asyncio

from services.predictor.config import PredictorConfig
from services.predictor.core.length_model import LengthQuery, LengthSample
from services.predictor.revising import Reviser
from services.predictor.served import ServedModels
from shared import subjects
from shared.bus import Bus, Endpoint, Handler, Listener, fenced, recorder_handlers, status_handlers, status_of
from shared.clock import Clock, monotonic_s
from shared.errors import InvalidRequest
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import LengthPrediction, PredictLength
from shared.messages.lengths import LengthsRevised, WorkerObserved
from shared.messages.reports import SequenceFinished, ServiceStatus
from shared.messages.sequence import FinishReason

HANDLERS: tuple[Handler, ...] = (
    Endpoint(subjects.PREDICTOR_PREDICT, PredictLength, "predict", concurrency=512),
    Listener(subjects.GATEWAY_FINISHED, SequenceFinished, "learn"),
    Listener(subjects.ANY_WORKER_OBSERVED, WorkerObserved, "observe", sender="worker_id"),
    *status_handlers("predictor"),
)

_log = get_logger("predictor")


class Predictor:
    """Message handlers: predict with the length model of the served model, and train it."""

    def __init__(
        self,
        bus: Bus,
        served: ServedModels,
        clock: Clock = monotonic_s,
        reviser: Reviser | None = None,
    ) -> None:
        self._bus = bus
        self._served = served
        self._reviser = reviser
        self._clock = clock
        self._started_s = clock()

    async def predict(self, asked: PredictLength) -> LengthPrediction:
        """Predict an answer's length. Raises InvalidRequest (`max_tokens` below 1) and Overloaded."""
        if asked.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        lengths = self._served.of(asked.model)
        predicted = await lengths.batcher.predict(
            LengthQuery(asked.prompt, asked.max_tokens, max(0, asked.generated_tokens))
        )
        if asked.generated_tokens <= 0:
            lengths.audit.on_predicted(asked.ref.key, predicted)
        return LengthPrediction(
            rl_tokens=predicted.rl_tokens,
            p50_tokens=predicted.p50_tokens,
            p80_tokens=predicted.p80_tokens,
            p90_tokens=predicted.p90_tokens,
            p95_tokens=predicted.p95_tokens,
            model_version=lengths.batcher.model.version,
        )

    def learn(self, finished: SequenceFinished) -> None:
        """Learn from an answer that ended by itself or at its limit; ignore other ends."""
        teaches = finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not teaches or finished.output_tokens < 1:
            if self._reviser is not None:
                self._reviser.forget(finished.ref.key)
            return
        censored = finished.finish_reason is FinishReason.LENGTH
        if self._reviser is not None:
            self._reviser.finish(finished.ref.key, finished.output_tokens, censored=censored)
        sample = LengthSample(finished.prompt, finished.output_tokens, censored)
        lengths = self._served.of(finished.model)
        lengths.batcher.observe(sample)
        if lengths.learner is not None:
            lengths.learner.observe(sample)
        lengths.audit.on_finished(finished.ref.key, finished.output_tokens, censored=censored)

    def observe(self, event: WorkerObserved) -> None:
        """Pass hidden states of running answers to the reviser."""
        if self._reviser is not None:
            self._reviser.observe(event)

    async def tell(self) -> None:
        """Publish revised lengths until cancelled. A lost message costs only accuracy."""
        me = self._bus.instance
        while self._reviser is not None:
            lengths = await self._reviser.revised.get()
            if self._bus.connected:
                with fenced("revised lengths"):
                    message = LengthsRevised(predictor_id=me, lengths=lengths)
                    await self._bus.publish(subjects.predictor_revised(me), message)

    async def status(self, _: Empty) -> ServiceStatus:
        """Return what `python -m services status` shows."""
        return status_of(
            self._bus,
            "predictor",
            self._clock() - self._started_s,
            {
                **self._served.summary(),
                **({} if self._reviser is None else self._reviser.summary()),
            },
        )


async def run(config: PredictorConfig) -> None:
    """Serve until cancelled. Raises ConfigError (unknown model) and BusUnavailable (no NATS at start)."""
    served = ServedModels(config)
    common = served.common.batcher
    reviser = None if config.rest_head == "none" else Reviser(common, config.rest_head, config.state_dir)
    bus = await Bus.connect(config.bus, service="predictor", instance=config.instance)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.run())
            predictor = Predictor(bus, served, reviser=reviser)
            await bus.attach(HANDLERS, predictor)
            await bus.attach(recorder_handlers("predictor"), bus.recorder)
            tasks.create_task(predictor.tell())
            canonical(_log, "predictor serving", model=config.model, version=common.model.version)
    finally:
        if reviser is not None:
            reviser.save()
        await bus.close()
