"""Publishes a worker's KV events over ZMQ in vLLM's format. Needs pyzmq, which is not installed by default.

PUB frames: topic, batch number (8 bytes, big-endian, from 0), msgpack `EventBatch`. On the ROUTER socket a
reader sends the number of the first batch it missed and receives the kept batches, then an end marker (-1).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from pydantic import Field

from services.worker.core.settings import Section
from services.worker.kv.core.kv_events import Event, EventBatch
from shared.bus import fenced
from shared.clock import unix_s
from shared.errors import ConfigError

_LOOK_S = 0.05
_END = (-1).to_bytes(8, "big", signed=True)
_MOST_QUEUED = 10_000
"""Batches that ZMQ queues for a slow subscriber, which sees a gap after them, and batches kept for replay."""


class KvEventsConfig(Section):
    """Section `worker.kv_events`."""

    endpoint: str = Field(
        default="",
        description="where to publish what the prefix cache gains and loses, in vLLM's format "
        "(tcp://127.0.0.1:5557; worker-1 takes the next port, and so on); empty: nowhere",
    )
    replay_endpoint: str = Field(default="", description="where readers ask for batches that they missed")
    topic: str = Field(default="", description="of all messages")


class KvEventPublisher:
    """Publishes the events of one worker; `look` returns the new ones."""

    def __init__(
        self, config: KvEventsConfig, instance: str, look: Callable[[], Awaitable[list[Event]]]
    ) -> None:
        """Raises ConfigError without pyzmq or for an endpoint without a port."""
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                "worker.kv_events needs pyzmq: `.venv/bin/python -m pip install --require-hashes "
                "-r deploy/locks/kv-events.txt`"
            ) from None
        self._zmq = zmq
        self._config = config
        self._look = look
        number = instance.rpartition("-")[2]
        self._rank = int(number) if number.isdecimal() else 0
        self._endpoint = beside(config.endpoint, self._rank)
        self._replay_endpoint = beside(config.replay_endpoint, self._rank)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_MOST_QUEUED)
        self._seq = 0
        self._encoder = msgspec.msgpack.Encoder()

    async def serve(self) -> None:
        """Publish until cancelled. Raises ConfigError if an address is in use."""
        with self._zmq.Context() as context:
            published = self._bound(context, self._zmq.PUB, self._endpoint)
            replay = self._replay_endpoint
            asked = self._bound(context, self._zmq.ROUTER, replay) if replay else None
            try:
                while True:
                    with fenced("events of the prefix cache"):
                        if events := await self._look():
                            self._publish(published, events)
                        while asked is not None and asked.poll(0):
                            await asyncio.to_thread(self._answer, asked)
                    await asyncio.sleep(_LOOK_S)
            finally:
                context.destroy(linger=0)

    def _bound(self, context: Any, kind: int, endpoint: str) -> Any:
        socket = context.socket(kind)
        socket.set_hwm(_MOST_QUEUED)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(f"worker.kv_events cannot listen at {endpoint}: {error}") from None
        return socket

    def _publish(self, socket: Any, events: list[Event]) -> None:
        payload = self._encoder.encode(EventBatch(unix_s(), events, self._rank))
        self._kept.append((self._seq, payload))
        socket.send_multipart((self._config.topic.encode(), self._seq.to_bytes(8, "big"), payload))
        self._seq += 1

    def _answer(self, socket: Any) -> None:
        """Answer one replay request. ZMQ drops batches that the reader does not take."""
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        reader, _, first = frames
        first_seq = int.from_bytes(first, "big")
        for seq, payload in [each for each in self._kept if each[0] >= first_seq]:
            socket.send_multipart((reader, b"", seq.to_bytes(8, "big"), payload))
        socket.send_multipart((reader, b"", _END, b""))


def beside(endpoint: str, number: int) -> str:
    """Return `endpoint` with its port raised by `number`. Raises ConfigError if it has no port."""
    address, _, port = endpoint.rpartition(":")
    if not endpoint:
        return ""
    if not port.isdecimal() or not address.startswith("tcp:"):
        raise ConfigError(f"worker.kv_events: {endpoint!r} is no endpoint; write tcp://127.0.0.1:5557")
    return f"{address}:{int(port) + number}"
