"""Request bodies within a size and a time, as JSON objects. Knows nothing of what is in them."""

import asyncio
from typing import Any

import orjson
from starlette.types import Receive

from services.gateway.errors import HttpError
from shared.errors import InvalidRequest


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(
    receive: Receive, content_length: str | None, *, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body.

    Raises HttpError 413 over the cap, 408 past the deadline, ClientGone on a lost connection.
    """
    if content_length is not None and content_length.isdecimal() and int(content_length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
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
    return content


def _too_large(max_bytes: int) -> HttpError:
    text = f"the request body is longer than {max_bytes} bytes"
    return HttpError(413, text, error_code="request_too_large", closes=True)
