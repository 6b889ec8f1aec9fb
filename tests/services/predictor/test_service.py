"""The predictor over a real bus."""

import asyncio

import pytest

from services.predictor.models import create
from services.predictor.service import HANDLERS, Predictor
from shared import subjects
from shared.errors import InvalidRequest
from shared.messages.base import Empty
from shared.messages.commands import LengthPrediction, PredictLength
from shared.messages.reports import SequenceFinished, ServiceStatus
from shared.messages.sequence import FinishReason, SequenceRef, pack_tokens
from tests.conftest import ConnectBus

PROMPT = pack_tokens(range(20))


def ref(number: int) -> SequenceRef:
    return SequenceRef(request_id=f"req_{number}", choice=0, attempt=1)


async def test_answers_learns_and_says_what_it_knows(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("predictor", "predictor-0")
    await bus.attach(HANDLERS, Predictor(bus, create("histogram")))
    client = await connect_bus("gateway", "gateway-0")

    async def ask(number: int, max_tokens: int = 1000) -> LengthPrediction:
        question = PredictLength(ref=ref(number), prompt=PROMPT, max_tokens=max_tokens)
        return await client.request(subjects.PREDICTOR_PREDICT, question, LengthPrediction, deadline_s=5.0)

    before = await ask(0)
    assert before.model_version == "histogram-0"
    for number in range(200):
        reason = FinishReason.CANCELLED if number % 10 == 9 else FinishReason.STOP
        length = 900 if reason is FinishReason.CANCELLED else 12
        over = SequenceFinished(
            ref=ref(number), prompt=PROMPT, output_tokens=length, finish_reason=reason, max_tokens=1000
        )
        await client.publish(subjects.GATEWAY_FINISHED, over)
    for _ in range(500):
        after = await ask(1000)
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
    with pytest.raises(InvalidRequest):
        await ask(1, max_tokens=0)
