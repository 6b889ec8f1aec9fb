"""Inline handlers: order across subscriptions, nothing queued, and an end that loses nothing."""

from shared.bus import Listener
from shared.bus.handlers import handle_inline
from shared.messages.base import Message, encode
from tests.conftest import ConnectBus
from tests.shared.bus.desk import until

EVENTS = ("kvasir.test.one", "kvasir.test.two")


class Note(Message, frozen=True, kw_only=True):
    number: int


class Reader:
    def __init__(self) -> None:
        self.one: list[int] = []
        self.both: list[int] = []

    def on_one(self, note: Note) -> None:
        self.one.append(note.number)
        self.both.append(note.number)

    def on_two(self, note: Note) -> None:
        self.both.append(note.number)


async def test_order_holds_across_subscriptions(connect_bus: ConnectBus) -> None:
    reader, bus, sender = Reader(), await connect_bus(), await connect_bus()
    listeners = tuple(Listener(s, Note, m) for s, m in zip(EVENTS, ("on_one", "on_two"), strict=True))
    await bus.attach(listeners, reader)
    for number in range(200):
        await sender.publish(EVENTS[number % 2], Note(number=number))
    await until(lambda: len(reader.both) == 200)
    assert reader.both == list(range(200)) and reader.one == list(range(0, 200, 2))
    await bus.detach(listeners, reader)


async def test_nothing_counts_as_pending(connect_bus: ConnectBus) -> None:
    bus, sender = await connect_bus(), await connect_bus()
    sizes: list[int] = []

    async def never(_: object) -> None:
        raise AssertionError("nats-py's own task is not used")

    subscription = await bus._link.client.subscribe(EVENTS[0], cb=never)
    handle_inline(subscription, lambda msg: sizes.append(len(msg.data)))
    await bus._link.barrier()
    for number in range(3):
        await sender.publish(EVENTS[0], Note(number=number))
    await until(lambda: len(sizes) == 3)
    assert sizes == [len(encode(Note(number=0)))] * 3
    assert subscription.pending_msgs == 0 and subscription.pending_bytes == 0
    await subscription.drain()  # type: ignore[no-untyped-call]
