"""HTTP routes of the live page: public files, and data for admins. On the gateway's listener, data needs an
admin key (`gateway.admin_key_sha256`). The operator's listener needs no key but a `Host` that is an address
or localhost, so that web pages of other names cannot read it."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final

import orjson
from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from services.gateway.core.time_account import explained
from services.gateway.errors import HttpError
from services.gateway.http.middleware import RECORD
from services.gateway.ui.watch import Colleagues, Watch
from shared.clock import unix_s

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".LICENSE": "text/plain; charset=utf-8",
}
_FILES: Final = {f"/ui/{path.relative_to(_STATIC)}": path for path in sorted(_STATIC.rglob("*.*"))}
PAGE_PATHS: Final = frozenset({"/", "/ui", "/ui/", "/ui/chat", *_FILES})
"""Need no key: the files hold nothing secret."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def add_page(
    app: FastAPI, watch: Watch, colleagues: Colleagues, admin_key_sha256: Collection[str] | None
) -> None:
    """Add the routes. `admin_key_sha256` is None on the operator's listener."""

    def check(request: Request) -> None:
        if admin_key_sha256 is None:
            _check_host(request.headers.get("host", ""))
        elif request.scope[RECORD].tenant not in admin_key_sha256:
            text = "this needs an admin key (gateway.admin_key_sha256); the operator's listener needs none"
            raise HttpError(403, text, error_code="admin_only")

    @app.get("/")
    async def root(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            text = "there is nothing at GET /: the API is below /v1, the chat at /ui/chat"
            raise HttpError(404, text, error_code="unknown_url")
        return RedirectResponse("/ui" if admin_key_sha256 is None else "/ui/chat", 303)

    @app.get("/ui")
    @app.get("/ui/")
    async def page() -> Response:
        return _file(_STATIC / "index.html")

    @app.get("/ui/chat")
    async def chat() -> Response:
        return _file(_STATIC / "chat.html")

    @app.get("/ui/stream")
    async def stream(request: Request) -> Response:
        check(request)
        return StreamingResponse(_pictures(watch), media_type="text/event-stream", headers=_STREAM_HEADERS)

    @app.get("/ui/workers/{worker_id}")
    async def worker(worker_id: str, request: Request) -> Response:
        check(request)
        found = watch.worker(worker_id)
        if found is None:
            raise HttpError(404, "no such worker is heard of", error_code="not_found")
        return _json(found)

    @app.get("/ui/requests/{request_id}")
    async def request_of(request_id: str, request: Request) -> Response:
        check(request)
        told, others = await asyncio.gather(
            colleagues.remembered(request_id), colleagues.everybodys(("placed", "started", "request"))
        )
        return _json(await asyncio.to_thread(explained, request_id, told, others, unix_s()))

    @app.get("/ui/{name:path}")
    async def file(name: str) -> Response:
        path = _FILES.get(f"/ui/{name}")
        if path is None:
            raise HttpError(404, f"there is nothing at GET /ui/{name[:64]}", error_code="unknown_url")
        return _file(path)


async def _pictures(watch: Watch) -> AsyncIterator[bytes]:
    viewer = watch.join()
    try:
        while (picture := await viewer.next()) is not None:
            yield picture
    finally:
        watch.leave(viewer)


def _check_host(host: str) -> None:
    """Raise HttpError for a name, which foreign DNS could point at this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name == "localhost":
        return
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        text = "here the page is only for this machine: call it by its address, or as localhost"
        raise HttpError(403, text, error_code="wrong_host") from None


def _file(path: Path) -> Response:
    kind = _TYPES.get(path.suffix, "application/octet-stream")
    return Response(path.read_bytes(), media_type=kind, headers=_HEADERS)


def _json(content: object) -> Response:
    return Response(
        orjson.dumps(content), media_type="application/json", headers={"cache-control": "no-store"}
    )
