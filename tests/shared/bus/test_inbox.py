"""Open questions: answered once, failed together, forgotten when closed."""

import asyncio

import nats
import pytest

from shared.bus.inbox import Inbox
from shared.errors import BusUnavailable
from tests.nats_server import NatsServer
from tests.patience import PATIENCE_S


async def test_answers_find_their_question(nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    inbox = Inbox("_INBOX_desk")
    await client.subscribe(inbox.subject, cb=inbox.on_message)
    first_subject, first = inbox.open_one("a")
    second_subject, second = inbox.open_one("b")
    closed_subject, closed = inbox.open_one("c")
    inbox.close(closed_subject)
    for subject in (second_subject, first_subject, closed_subject, second_subject):
        await client.publish(subject, subject.encode())
    async with asyncio.timeout(PATIENCE_S):
        assert (await first).data == first_subject.encode()
        assert (await second).data == second_subject.encode()
    await client.flush()
    assert not closed.done()
    await client.close()


async def test_failing_one_subject_leaves_the_others_open() -> None:
    inbox = Inbox("_INBOX_desk")
    (_, asked_a), (_, asked_b) = inbox.open_one("a"), inbox.open_one("b")
    inbox.fail(BusUnavailable("not allowed"), "a")
    with pytest.raises(BusUnavailable, match="not allowed"):
        await asked_a
    assert not asked_b.done()
    inbox.fail(BusUnavailable("lost"))
    inbox.fail(BusUnavailable("lost again"))
    with pytest.raises(BusUnavailable, match=r"lost$"):
        await asked_b
