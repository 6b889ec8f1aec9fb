"""Fetches a data file into the user's cache and keeps it only when it is the one that was listed."""

import hashlib
from pathlib import Path

import httpx

from bench.datasets.sources import Source
from shared.errors import InternalError, UnavailableError

_CONNECT_S, _DEADLINE_S = 5.0, 60.0
_MOST_EXTRA_BYTES = 1 << 20


def download(source: Source, cache: Path, transport: httpx.BaseTransport | None = None) -> Path:
    """The file's place. Raises UnavailableError without a network, InternalError for another content."""
    target = cache / source.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(target.suffix + ".part")
    try:
        digest = _fetch(source, part, transport)
        if digest != source.sha256:
            raise InternalError(f"{source.url} has changed: its SHA-256 is {digest}")
        part.replace(target)
    except (httpx.HTTPError, OSError) as error:
        raise UnavailableError(f"{source.url}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _fetch(source: Source, part: Path, transport: httpx.BaseTransport | None) -> str:
    digest, size = hashlib.sha256(), 0
    timeout = httpx.Timeout(_DEADLINE_S, connect=_CONNECT_S)
    with (
        httpx.Client(timeout=timeout, follow_redirects=True, transport=transport) as client,
        client.stream("GET", source.url) as response,
        part.open("wb") as out,
    ):
        response.raise_for_status()
        for piece in response.iter_bytes():
            size += len(piece)
            if size > source.bytes + _MOST_EXTRA_BYTES:
                raise InternalError(f"{source.url} is longer than the {source.bytes} bytes it should have")
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()
