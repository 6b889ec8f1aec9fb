"""Waiting for admission and for tokens: every wait ends."""

import asyncio

import pytest

from services.gateway.core.stream import Stream, StreamTiming
from services.gateway.exchange import Deadline, Exchange, OpenChoice, admitted
from shared.errors import DeadlineExceeded, InternalError, NoResponder
from shared.messages.sequence import Sampling, pack_tokens
from tests.patience import PATIENCE_S

SAMPLING = Sampling(seed=5, max_tokens=10)


def exchange_of(choices: int) -> Exchange:
    exchange = Exchange(accepted_s=1.0)
    for choice in range(choices):
        stream = Stream(("req", choice), StreamTiming(), 0.0)
        stream.submit(0.0)
        prompt = pack_tokens([1, 2, 3])
        exchange.sequences.append(OpenChoice(stream, prompt, SAMPLING, exchange))
    return exchange


def accept(exchange: Exchange, at: int) -> None:
    exchange.sequences[at].stream.on_submitted(1, 0.0)
    exchange.changed.set()


async def test_admission_waits_for_all() -> None:
    exchange = exchange_of(2)
    waiting = asyncio.create_task(admitted(exchange, 5))
    accept(exchange, 0)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    accept(exchange, 1)
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_admission_ends_in_time() -> None:
    with pytest.raises(NoResponder, match="no scheduler took 1 of 2 sequences") as caught:
        exchange = exchange_of(2)
        accept(exchange, 0)
        await admitted(exchange, 0.05)
    assert caught.value.retry_after_s == 2.0


async def test_an_expired_deadline_ends_every_wait() -> None:
    exchange = exchange_of(1)
    exchange.deadline = Deadline(0.0, 2.0)
    waiting = asyncio.create_task(admitted(exchange, 5))
    await asyncio.sleep(0)
    exchange.fail(exchange.deadline.error())
    with pytest.raises(DeadlineExceeded, match="within the 2 s"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    assert exchange.sequences[0].spec("g", 9, 3.5).deadline_in_s == 0.0


async def test_an_answer_that_cannot_be_written_fails_alone() -> None:
    exchange = exchange_of(1)
    exchange.on_news = lambda: bool(1 // 0)
    exchange.notify()
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await asyncio.wait_for(exchange.wait(), PATIENCE_S)


def test_what_was_taken_once_is_submitted_as_resumed() -> None:
    """So that a scheduler that is new, or busy, does not refuse it."""
    exchange = exchange_of(1)
    (sequence,) = exchange.sequences
    assert not sequence.spec("g", 9, 3.5).is_resumed
    accept(exchange, 0)
    assert sequence.spec("g", 9, 3.5).is_resumed
    (inherited,) = exchange_of(1).sequences
    inherited.exchange.is_resumed = True
    assert inherited.spec("g", 9, 3.5).is_resumed
