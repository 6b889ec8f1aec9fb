"""Small messages: in order, acknowledgements together, never in the way."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from services.gateway import dispatch as module
from services.gateway.dispatch import NoticeOutbox
from shared import subjects
from shared.bus import Bus, Listener
from shared.messages.commands import CancelSequence
from shared.messages.sequence import SequenceRef
from shared.messages.tokens import AcknowledgeEnds
from tests.nats_server import NatsServer
from tests.services.gateway.fakes import cancelled, until

ConnectBus = Callable[..., Awaitable[Bus]]


class Reader:
    """Keeps what arrives for worker-0."""

    HANDLERS = (
        Listener(subjects.worker_cancel, CancelSequence, "on_message"),
        Listener(subjects.worker_acknowledge, AcknowledgeEnds, "on_message"),
    )

    def __init__(self) -> None:
        self.messages: list[msgspec.Struct] = []

    def on_message(self, message: msgspec.Struct) -> None:
        self.messages.append(message)


def ref(number: int) -> SequenceRef:
    return SequenceRef(request_id=f"req_{number}", choice=0, attempt=1)


def cancel(number: int) -> CancelSequence:
    return CancelSequence(ref=ref(number))


async def test_messages_go_in_order_and_ends_together(connect_bus: ConnectBus) -> None:
    reader = Reader()
    await (await connect_bus("worker", "worker-0")).attach(Reader.HANDLERS, reader)
    outbox = NoticeOutbox(await connect_bus())
    for number in range(3):
        outbox.put(subjects.worker_cancel("worker-0"), cancel(number))
        outbox.acknowledge("worker-0", ref(number))
    outbox.acknowledge("worker-0", ref(2))
    sending = asyncio.create_task(outbox.run())
    await until(lambda: len(reader.messages) == 4)
    await cancelled(sending)
    cancels = [message for message in reader.messages if isinstance(message, CancelSequence)]
    (acknowledged,) = [message for message in reader.messages if isinstance(message, AcknowledgeEnds)]
    assert cancels == [cancel(0), cancel(1), cancel(2)]
    assert sorted(r.request_id for r in acknowledged.refs) == ["req_0", "req_1", "req_2"]


async def test_a_full_outbox_drops_its_oldest(
    connect_bus: ConnectBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 3)
    reader = Reader()
    await (await connect_bus("worker", "worker-0")).attach(Reader.HANDLERS, reader)
    outbox = NoticeOutbox(await connect_bus())
    for number in range(5):
        outbox.put(subjects.worker_cancel("worker-0"), cancel(number))
    await outbox.flush()
    await until(lambda: len(reader.messages) == 3)
    assert reader.messages == [cancel(2), cancel(3), cancel(4)]


async def test_a_bus_that_takes_nothing_does_not_stop_it(
    connect_bus: ConnectBus, nats_server: NatsServer
) -> None:
    bus = await connect_bus()
    outbox = NoticeOutbox(bus)
    await bus.close()
    outbox.put(subjects.worker_cancel("worker-0"), cancel(0))
    outbox.acknowledge("worker-0", ref(0))
    await asyncio.wait_for(outbox.flush(), 5)
    await asyncio.wait_for(outbox.flush(), 5)
