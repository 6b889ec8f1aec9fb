"""Reads request bodies within size and time limits, and decompresses them."""

import asyncio
import zlib

from fastapi import Request
from starlette.types import Receive

from services.gateway.config import GatewayConfig
from services.gateway.errors import ClientGone, HttpError, shown
from services.gateway.http.connection import MAX_DISCARDED_BYTES
from services.gateway.text.tokenizer import AT_ONCE_BYTES, TokenizerThreads
from shared.errors import InvalidRequest

_RAW, _GZIP_OR_ZLIB = -zlib.MAX_WBITS, zlib.MAX_WBITS | 32
_GZIP = b"\x1f\x8b"
"""Begins each member of a gzip body."""
_AT_ONCE = 4096
"""Bytes to inflate at once: the rest of them is copied at the end of each member."""
_ENCODINGS = {"": False, "identity": False, "gzip": True, "x-gzip": True, "deflate": True}
"""Supported encodings; True: the body is compressed."""


async def read_body(request: Request, config: GatewayConfig, threads: TokenizerThreads) -> bytes:
    """Return the whole body. Raises HttpError 413 above the size limit (packed or unpacked), 408 past the
    deadline, 415 for an unknown encoding; InvalidRequest for a corrupt body, ClientGone on a disconnect."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        text = f"a body with Content-Encoding {shown(encoding, 64)!r} is not read"
        advice = "send it as it is, or packed with gzip or deflate"
        raise HttpError(415, f"{text}: {advice}", error_code="unsupported_encoding", closes=True)
    most, timeout_s = config.max_body_bytes, config.receive_timeout_s
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most + MAX_DISCARDED_BYTES:
        raise _too_large(most)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _collect(request.receive, most)
    except TimeoutError:
        text = f"the request body did not arrive within {timeout_s:g} s"
        raise HttpError(408, text, error_code="request_timeout", closes=True) from None
    if not _ENCODINGS[encoding]:
        return body
    # The single reader thread bounds how many inflated bodies wait.
    return await threads.read(lambda: inflated(body, most), max(len(body), AT_ONCE_BYTES + 1))


def inflated(body: bytes, max_bytes: int) -> bytes:
    """Decompress gzip (of any number of members) or deflate (zlib or raw), up to `max_bytes`. Raises
    HttpError 413 for a longer result, InvalidRequest for truncated or other data."""
    content, at, bits = bytearray(), 0, _GZIP_OR_ZLIB
    while True:
        unpacking, begin = zlib.decompressobj(bits), at
        try:
            while not unpacking.eof and at < len(body):
                part = body[at : at + _AT_ONCE]
                content += unpacking.decompress(part, max_bytes + 1 - len(content))
                if len(content) > max_bytes:
                    raise _too_large(max_bytes, "inflated ", closes=False)
                at += len(part) - len(unpacking.unused_data)
        except zlib.error as error:
            if begin or bits == _RAW:
                raise InvalidRequest(f"the body cannot be inflated: {error}") from None
            at, bits = 0, _RAW
            content.clear()
            continue
        if not unpacking.eof:
            raise InvalidRequest("the packed body is cut off: it ends before its content does")
        if at == len(body):
            return bytes(content)
        if not body.startswith(_GZIP, at):
            raise InvalidRequest("the packed body has more after its end: pack it as one piece")


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


def _too_large(max_bytes: int, how: str = "", *, closes: bool = True) -> HttpError:
    text = f"the {how}request body is longer than {max_bytes} bytes"
    return HttpError(413, text, error_code="request_too_large", closes=closes)
