"""The HTTP routes. Handlers raise errors; error responses are written elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from secrets import token_bytes
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.anthropic import parse_messages
from services.gateway.config import GatewayConfig
from services.gateway.database import committed
from services.gateway.errors import ClientGone, HttpError
from services.gateway.exchange import HEADER, Deadline, deadline_of
from services.gateway.http.browser import written
from services.gateway.http.completion_response import Reading
from services.gateway.http.middleware import CLIENT_GONE_STATUS, RECORD, RequestRecord, refusal
from services.gateway.http.reading import SURFACES, Models, ReadBody, RequestReader
from services.gateway.http.stored import Following, ResponseStore, add_stored, written_json
from services.gateway.lasting.desk import LastingDesk, fingerprint_of, name_of
from services.gateway.openai.admission import Acceptance
from services.gateway.openai.replies import model_body
from services.gateway.openai.responses import ResponseWriter
from services.gateway.openai.tokenize import detokenized, tokenized
from services.gateway.sessions import Sessions
from shared import metrics
from shared.clock import unix_s
from shared.errors import InternalError, InvalidRequest, KvasirError, NoResponder
from shared.messages.sequence import pack_tokens
from shared.messages.shadows import Shadow
from shared.release import VERSION

KEY_HEADER = "Idempotency-Key"
MOST_KEY_CHARS = 255
RESPONSES = "/v1/responses"


def key_of(request: Request) -> str | None:
    """Return the request's Idempotency-Key, if any. Raises InvalidRequest for a malformed one."""
    key = request.headers.get(KEY_HEADER)
    if key is not None and not (0 < len(key) <= MOST_KEY_CHARS and key.isascii() and key.isprintable()):
        text = f"{KEY_HEADER} should be 1 to {MOST_KEY_CHARS} printable ASCII characters"
        raise InvalidRequest(text, param=KEY_HEADER)
    return key


RouteHandler = Callable[[Request], Awaitable[Response]]


class Shortcut:
    """ASGI wrapper: POSTs to the given paths go straight to their handlers, past the router; HEAD is
    answered as GET, whose body the server omits."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, RouteHandler]) -> None:
        self._app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        handler = self._posts.get(scope["path"]) if method == "POST" else None
        if handler is None:
            return await self._app({**scope, "method": "GET"} if method == "HEAD" else scope, receive, send)
        try:
            response = await handler(Request(scope, receive))
        except ClientGone:
            scope[RECORD].is_gone = True
            response = Response(status_code=CLIENT_GONE_STATUS)
        await response(scope, receive, send)


AddPage = Callable[[FastAPI], None]


def make_app(
    sessions: Sessions,
    models: Models,
    config: GatewayConfig,
    desk: LastingDesk,
    read: ReadBody,
    store: ResponseStore | None = None,
    add_page: AddPage = lambda _: None,
) -> ASGIApp:
    """Return the application behind `Edge`. Without `store`, no response is stored."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    reader = RequestReader(sessions, models, config, store)
    desk.reread = reader.read_again
    completions = _completions(reader, read, config, desk)
    for path, handler in completions.items():
        app.add_route(path, handler, methods=["POST"])
    add_stored(app, store, desk)
    _add_probes(app, sessions)
    add_page(app)
    _handle_errors(app)
    began_s = int(unix_s())
    describe = cache(partial(written, VERSION, models.names))
    """Takes 0.1 s: not at each start, and beside the event loop."""

    def entry(model: Acceptance, name: str) -> dict[str, Any]:
        return model_body(name, began_s, sessions.workers.context_tokens(model.config.served_name))

    @app.get("/v1/models")
    async def every_model() -> Response:
        data = [entry(models.find(name), name) for name in models.names]
        # Codex reads `models`; an entry would replace its own instructions to the model.
        return _json({"object": "list", "data": data, "models": []})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        return _json(entry(models.find(model_id), model_id))

    @app.get("/openapi.json")
    async def show_schema() -> Response:
        return written_json((await asyncio.to_thread(describe))[0])

    @app.get("/docs")
    async def show_docs() -> Response:
        return Response((await asyncio.to_thread(describe))[1], media_type="text/html")

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": VERSION})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read(request)
        model = models.of(body)
        limit = await sessions.context_tokens(config.admit_timeout_s, model.config.served_name)
        return written_json(await tokenized(model, body, limit))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read(request)
        return written_json(await detokenized(models.of(body), body))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await read(request)
        model = models.of(body)
        ignored = model.ignored()
        chat = partial(parse_messages, body, config.max_messages, ignored, counts=True)
        tokens = await model.count(chat, len(body), ignored)
        request.scope[RECORD].ignored = ignored.names
        return _json({"input_tokens": tokens})

    return Shortcut(app, completions)


def make_operator_app(sessions: Sessions, add_page: AddPage = lambda _: None) -> ASGIApp:
    """Return the operator listener's application; it has an `Edge` of its own."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_probes(app, sessions, tells_troubles=True)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        if "origin" in request.headers:
            raise HttpError(403, "this is not for pages in a browser", error_code="wrong_origin")
        workers = [report.worker_id for report in sessions.workers.reports()]
        return _json({"forgotten_blocks": await sessions.dispatch.forget_prefixes(workers)})

    add_page(app)
    _handle_errors(app)
    return app


def _completions(
    reader: RequestReader, read: ReadBody, config: GatewayConfig, desk: LastingDesk
) -> dict[str, RouteHandler]:
    async def complete(path: str, request: Request) -> Response:
        record: RequestRecord = request.scope[RECORD]
        key = key_of(request)
        body = await read(request)
        limits = config.request_timeout_s, config.max_request_timeout_s
        deadline = deadline_of(request.headers.get(HEADER), *limits, record.began_s)
        if key is not None:
            return await named(path, body, record, deadline, name_of(record.tenant, "key", key))
        async with deadline.enforced():
            reading = await reader.read(path, body, record)
        if path == RESPONSES:
            return await respond(path, body, record, deadline, reading)
        return reader.answer(reading, record, deadline)

    async def named(
        path: str, body: bytes, record: RequestRecord, deadline: Deadline, name: bytes
    ) -> Response:
        """Answer a request with an Idempotency-Key: as before, if its name is known."""
        async with deadline.enforced(), desk.turn(name):
            if (kept := await desk.find(name, fingerprint_of(path, body))) is not None:
                return Following(desk, kept, record)
            reading = await reader.read(path, body, record)
            return await respond(path, body, record, deadline, reading, (name,))

    async def respond(
        path: str,
        body: bytes,
        record: RequestRecord,
        deadline: Deadline,
        reading: Reading,
        names: tuple[bytes, ...] = (),
    ) -> Response:
        """Return the response, which lasts if it has `names` or can be read by its id."""
        is_named, writer = bool(names), reading.writer
        begun = writer.begin_in_background() if isinstance(writer, ResponseWriter) else None
        is_streamed = path == RESPONSES and reading.job.stream and (is_named or desk.has_peers)
        if is_streamed or begun is not None:
            names += (name_of(record.tenant, "response", f"resp_{reading.answer_id}"),)
        if not names:
            return reader.answer(reading, record, deadline)
        shadow = Shadow(
            request_id=record.request_id,
            names=names,
            fingerprint=fingerprint_of(path, body),
            path=path,
            body=body,
            answer_id=reading.answer_id,
            created=reading.created,
            key=record.tenant,
            tenant=record.owner,
            prompts=tuple(pack_tokens(prompt) for prompt in reading.job.prompts),
            samplings=reading.job.samplings,
            choices=reading.job.n,
            heir_key=token_bytes(16),
            is_asked_for=is_named or begun is not None,
            is_background=begun is not None,
            deadline_in_s=deadline.remaining_s(),
        )
        record.is_lasting = True
        kept = desk.begin(shadow, partial(reader.answer, reading, record, deadline))
        if begun is None or reading.job.stream:
            return Following(desk, kept, record)
        async with deadline.enforced():
            await desk.shadow(kept)
            if writer.stored is not None:  # its client may ask any gateway for it at once
                await committed(writer.stored)
        return written_json(begun)

    return {path: partial(complete, path) for path in SURFACES}


def _add_probes(app: FastAPI, sessions: Sessions, *, tells_troubles: bool = False) -> None:
    """Add the probes. With `tells_troubles`, /ready also lists the stack's problems."""

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        return _json({})

    @app.get("/ready")
    async def ready() -> Response:
        reasons = sessions.unready_reasons()
        if reasons:
            raise NoResponder("not ready: " + "; ".join(reasons))
        wrong = sessions.stack.troubles(sessions.now_s()) if tells_troubles else None
        told = {} if wrong is None else {"well": not wrong, "troubles": wrong}
        return _json({"status": "ready", **told})


def _json(content: object) -> Response:
    return written_json(orjson.dumps(content))


def _handle_errors(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        headers = error.headers if isinstance(error, HTTPException) else None
        known = request.scope[RECORD].error = _known(error, request)
        return refusal(known, request.url.path, headers)

    async def on_client_gone(request: Request, error: Exception) -> Response:
        request.scope[RECORD].is_gone = True
        return Response(status_code=CLIENT_GONE_STATUS)

    app.add_exception_handler(ClientGone, on_client_gone)
    for kind in (KvasirError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, on_error)


def _known(error: Exception, request: Request) -> KvasirError:
    if isinstance(error, KvasirError):
        return error
    if isinstance(error, RequestValidationError):
        return InvalidRequest(str(error))
    if not isinstance(error, HTTPException):
        return InternalError(str(error))
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404 and request.url.path.endswith(("/rerank", "/score")):
        text = "no model served here ranks or scores texts: compare their vectors from /v1/embeddings"
        return HttpError(501, text, error_code="not_supported")
    if error.status_code == 404:
        return HttpError(404, f"there is nothing at {where}", error_code="unknown_url")
    if error.status_code == 405:
        return HttpError(405, f"{where} is not allowed", error_code="method_not_allowed")
    return HttpError(error.status_code, str(error.detail), error_code="http_error")
