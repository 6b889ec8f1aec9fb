"""Request bodies within a size and a time, as JSON objects. Knows nothing of what is in them."""

import asyncio
from typing import Any

import orjson
from starlette.types import Receive

from services.gateway.errors import HttpError
from shared.errors import InvalidRequest

MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""A body over the cap is read on and thrown away this far: a client reads no answer while it still writes."""


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


MAX_FIELDS = 1024
"""On the outermost level of a body; OpenAI's API has some forty."""


async def read_body(
    receive: Receive, content_length: str | None, *, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body.

    Raises HttpError 413 over the cap and 408 past the deadline, ClientGone on a lost connection.
    """
    if _announced_bytes(content_length) > max_bytes + MAX_DISCARDED_BYTES:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(receive, max_bytes)
    except TimeoutError:
        text = f"the request body did not arrive within {timeout_s:g} s"
        raise HttpError(408, text, error_code="request_timeout", closes=True) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest for anything else: no UTF-8, no JSON, an array."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("the body is not a JSON object")
    if len(content) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(content)} fields; send at most {MAX_FIELDS}")
    return content


def parse_chat(body: bytes, max_messages: int) -> dict[str, Any]:
    """`parse_object` of a body with `messages`, of which an empty one costs as much to render as a long one.

    Raises InvalidRequest for more than `max_messages`, each part of a content counted as one, before anything
    looks at them.
    """
    content = parse_object(body)
    messages = content.get("messages")
    if isinstance(messages, list):
        parts = (message.get("content") for message in messages if isinstance(message, dict))
        count = len(messages) + sum(len(part) for part in parts if isinstance(part, list))
        if count > max_messages:
            text = f"{count} messages and content parts; send at most {max_messages} in one request"
            raise InvalidRequest(text, param="messages")
    return content


def _announced_bytes(content_length: str | None) -> int:
    return int(content_length) if content_length is not None and content_length.isdecimal() else 0


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    received_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        received_bytes += len(part)
        if received_bytes <= max_bytes:
            body += part
        is_last = not message.get("more_body", False)
        if received_bytes > max_bytes and (is_last or received_bytes > max_bytes + MAX_DISCARDED_BYTES):
            raise _too_large(max_bytes)
        if is_last:
            return bytes(body)


def _too_large(max_bytes: int) -> HttpError:
    text = f"the request body is longer than {max_bytes} bytes"
    return HttpError(413, text, error_code="request_too_large", closes=True)
