"""The client reads whatever the server sends, however it is cut into packets."""

import asyncio
from random import Random

import pytest
from nats.aio.msg import Msg

from shared.bus.client import FairClient
from shared.bus.serving import handle_inline
from tests.patience import PATIENCE_S, until

INFO = b'INFO {"server_id":"S","version":"2.15.0","max_payload":1048576,"proto":1,"headers":true}\r\n'
COUNT = 200


class ScriptedServer(asyncio.Protocol):
    """Greets, and answers pings; a test sends the rest."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self.transport.write(INFO)
        self.heard = b""

    def data_received(self, data: bytes) -> None:
        self.heard += data
        if b"PING\r\n" in data:
            self.transport.write(b"PONG\r\n")


async def _never(_: object) -> None:
    raise AssertionError("nats-py's own task is not used")


def _message(number: int, dice: Random) -> tuple[bytes, list[bytes]]:
    """What the server sends, and the payloads that arrive."""
    payload = (
        bytes(dice.choice(b"\r\nMSGPING x") for _ in range(dice.choice((0, 1, 40, 5000)))) + b"%d" % number
    )
    kind = dice.choice(("plain", "plain", "plain", "reply", "headers", "unknown", "ping"))
    if kind == "headers":
        head = b"NATS/1.0\r\nk: v\r\n\r\n"
        return b"HMSG a 1 %d %d\r\n%b%b\r\n" % (len(head), len(head) + len(payload), head, payload), [payload]
    if kind == "unknown":
        return b"MSG b 99 %d\r\n%b\r\n" % (len(payload), payload), []
    if kind == "ping":
        return b"PING\r\n", []
    reply = b"_INBOX.x " if kind == "reply" else b""
    return b"MSG a 1 %b%d\r\n%b\r\n" % (reply, len(payload), payload), [payload]


@pytest.mark.parametrize("cut", [1, 7, 1000, 1_000_000])
async def test_messages_arrive_whole_and_in_order(cut: int) -> None:
    """`cut` is the longest packet."""
    peer, dice = ScriptedServer(), Random(cut)
    listening = await asyncio.get_running_loop().create_server(lambda: peer, "127.0.0.1", 0)
    client, arrived = FairClient(), list[Msg]()
    await client.connect(f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    handle_inline(await client.subscribe("a", cb=_never), arrived.append)
    await until(lambda: b"SUB a" in peer.heard)
    sent, expected, pings = b"", list[bytes](), 0
    for number in range(COUNT if cut > 1 else 20):
        data, payloads = _message(number, dice)
        sent, expected, pings = sent + data, expected + payloads, pings + (data == b"PING\r\n")
    peer.heard = b""
    async with asyncio.timeout(PATIENCE_S):
        at = 0
        while at < len(sent):
            size = dice.randint(1, cut)
            peer.transport.write(sent[at : at + size])
            at += size
            await asyncio.sleep(0)
    await until(lambda: len(arrived) == len(expected))
    assert [message.data for message in arrived] == expected
    assert {message.reply for message in arrived} == {"", "_INBOX.x"}
    await until(lambda: peer.heard.count(b"PONG\r\n") == pings)
    await client.close()
    listening.close()
