"""The predictor on the bus: answers `PredictLength`, learns from `SequenceFinished`.

It owns nothing that must survive: a restart begins with the prior. It knows no scheduler, no worker.
"""

import asyncio

from services.predictor.config import PredictorConfig
from services.predictor.models import create
from services.predictor.models.base import LengthModel, LengthSample
from services.predictor.state import PredictionAudit
from shared import subjects
from shared.bus import Bus, Endpoint, Gatherable, Handler, Listener
from shared.clock import Clock, monotonic_s
from shared.errors import InvalidRequest
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import LengthPrediction, PredictLength
from shared.messages.reports import SequenceFinished, ServiceStatus
from shared.messages.sequence import FinishReason

HANDLERS: tuple[Handler, ...] = (
    Endpoint(subjects.PREDICTOR_PREDICT, PredictLength, "predict"),
    Listener(subjects.GATEWAY_FINISHED, SequenceFinished, "learn"),
    Gatherable(subjects.status("predictor"), Empty, "status"),
)

_log = get_logger("predictor")


class Predictor:
    """One length model and the audit of what it said."""

    def __init__(self, bus: Bus, model: LengthModel, clock: Clock = monotonic_s) -> None:
        self._bus = bus
        self._model = model
        self._audit = PredictionAudit()
        self._clock = clock
        self._started_s = clock()

    async def predict(self, asked: PredictLength) -> LengthPrediction:
        """Raises InvalidRequest when `max_tokens` leaves room for no answer."""
        if asked.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        predicted = self._model.predict(
            asked.prompt, max_tokens=asked.max_tokens, generated_tokens=asked.generated_tokens
        )
        self._audit.on_predicted(asked.ref.key, predicted.rl_tokens)
        return LengthPrediction(
            rl_tokens=predicted.rl_tokens,
            p50_tokens=predicted.p50_tokens,
            p80_tokens=predicted.p80_tokens,
            p90_tokens=predicted.p90_tokens,
            p95_tokens=predicted.p95_tokens,
            model_version=self._model.version,
        )

    def learn(self, finished: SequenceFinished) -> None:
        """Whole answers, and those cut by their limit, teach; the rest ended for other reasons."""
        if finished.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        censored = finished.finish_reason is FinishReason.LENGTH
        self._model.observe(LengthSample(finished.prompt, finished.output_tokens, censored))
        self._audit.on_finished(finished.ref.key, finished.output_tokens, censored=censored)

    async def status(self, _: Empty) -> ServiceStatus:
        """What `python -m services status` shows."""
        return ServiceStatus(
            service="predictor",
            instance=self._bus.instance,
            incarnation=self._bus.incarnation,
            uptime_s=self._clock() - self._started_s,
            details={
                "model": self._model.name,
                "model_version": self._model.version,
                **self._audit.summary(),
            },
        )


async def run(config: PredictorConfig) -> None:
    """Serves until cancelled. Raises ConfigError (unknown model) and BusUnavailable (no NATS at start)."""
    model = create(config.model)
    bus = await Bus.connect(config.bus, service="predictor", instance=config.instance)
    try:
        await bus.attach(HANDLERS, Predictor(bus, model))
        canonical(_log, "predictor serving", model=config.model)
        await asyncio.Event().wait()
    finally:
        await bus.close()
