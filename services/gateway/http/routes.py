"""The HTTP routes. Handlers raise errors; error responses are written elsewhere."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.anthropic.requests import parse_messages
from services.gateway.config import GatewayConfig
from services.gateway.errors import ClientGone, HttpError
from services.gateway.exchange import HEADER, deadline_of
from services.gateway.http.bodies import BodyReader
from services.gateway.http.browser import HeadAsGet, written
from services.gateway.http.middleware import CLIENT_GONE_STATUS, RECORD, RequestRecord, refusal
from services.gateway.http.reading import RequestReader, shadow_of
from services.gateway.http.stored import add_stored
from services.gateway.http.surfaces import SURFACES
from services.gateway.lasting.desk import LastingDesk, fingerprint_of, name_of
from services.gateway.lasting.following import Following
from services.gateway.models import Models, ServedModel
from services.gateway.openai.replies import model_body
from services.gateway.openai.response_replies import ResponseWriter
from services.gateway.openai.response_store import ResponseStore
from services.gateway.sessions import Sessions
from shared import metrics
from shared.clock import unix_s
from shared.errors import InternalError, InvalidRequest, KvasirError, NoResponder
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
    """ASGI wrapper that sends POSTs to the given paths straight to their handlers, past the router."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, RouteHandler]) -> None:
        self._app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._posts.get(scope["path"]) if scope["method"] == "POST" else None
        if handler is None:
            return await self._app(scope, receive, send)
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
    store: ResponseStore | None = None,
    add_page: AddPage = lambda _: None,
) -> ASGIApp:
    """Return the application behind `Edge`. Without `store`, no response is stored."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    reader = RequestReader(sessions, models, config, store)
    bodies = BodyReader(config, models.first.acceptance.threads)
    desk.reread = reader.read_again
    completions = _completions(reader, bodies, config, desk, store)
    for path, handler in completions.items():
        app.add_route(path, handler, methods=["POST"])
    _add_tokenization(app, sessions, models, config, bodies)
    _add_counting(app, models, config, bodies)
    _add_models(app, sessions, models)
    add_stored(app, store, desk)
    _add_probes(app, sessions)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": VERSION})

    _add_description(app, models)
    add_page(app)
    _handle_errors(app)
    return HeadAsGet(Shortcut(app, completions))


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
    reader: RequestReader,
    bodies: BodyReader,
    config: GatewayConfig,
    desk: LastingDesk,
    store: ResponseStore | None,
) -> dict[str, RouteHandler]:
    async def complete(path: str, request: Request) -> Response:
        record: RequestRecord = request.scope[RECORD]
        key = key_of(request)
        body = await bodies.read(request)
        deadline = deadline_of(
            request.headers.get(HEADER),
            config.request_timeout_s,
            config.max_request_timeout_s,
            record.began_s,
        )
        name = name_of(record.tenant, "key", "" if key is None else key)
        async with AsyncExitStack() as turn, deadline.enforced():
            if key is not None:
                await turn.enter_async_context(desk.turn(name))
                if (kept := await desk.find(name, fingerprint_of(path, body))) is not None:
                    return Following(desk, kept, record)
            reading = await reader.read(path, body, record)
            names: tuple[bytes, ...] = () if key is None else (name,)
            writer = reading.writer
            begun = writer.begin_in_background() if isinstance(writer, ResponseWriter) else None
            is_streamed = path == RESPONSES and reading.job.stream and (names or desk.has_peers)
            if is_streamed or begun is not None:
                names += (name_of(record.tenant, "response", f"resp_{reading.answer_id}"),)
            if not names:
                return reader.answer(reading, record, deadline)
            shadow = shadow_of(
                reading,
                record,
                deadline,
                path=path,
                body=body,
                names=names,
                fingerprint=fingerprint_of(path, body),
                is_asked_for=key is not None or begun is not None,
                is_background=begun is not None,
            )
            record.is_lasting = True
            kept = desk.begin(shadow, partial(reader.answer, reading, record, deadline))
            if begun is not None and not reading.job.stream:
                await desk.shadow(kept)
                if store is not None:  # its client may ask any gateway for it at once
                    await store.settle()
                return _written(begun)
            return Following(desk, kept, record)

    return {path: partial(complete, path) for path in SURFACES}


def _add_counting(app: FastAPI, models: Models, config: GatewayConfig, bodies: BodyReader) -> None:
    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await bodies.read(request)
        acceptance = models.of(body).acceptance
        ignored = acceptance.ignored()
        read = partial(parse_messages, body, config.max_messages, ignored, counts=True)
        tokens = await acceptance.count(read, len(body), ignored)
        request.scope[RECORD].ignored = ignored.names
        return _json({"input_tokens": tokens})


def _add_models(app: FastAPI, sessions: Sessions, models: Models) -> None:
    began_s = int(unix_s())

    def entry(served: ServedModel, name: str) -> dict[str, Any]:
        return model_body(name, began_s, sessions.workers.context_tokens(served.name))

    @app.get("/v1/models")
    async def every_model() -> Response:
        data = [entry(models.find(name), name) for name in models.names]
        # Codex reads `models`; an entry would replace its own instructions to the model.
        return _json({"object": "list", "data": data, "models": []})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        return _json(entry(models.find(model_id), model_id))


def _add_description(app: FastAPI, models: Models) -> None:
    schema, page = written(VERSION, models.names)

    @app.get("/openapi.json")
    async def show_schema() -> Response:
        return _written(schema)

    @app.get("/docs")
    async def show_docs() -> Response:
        return Response(page, media_type="text/html")


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
        wrong = sessions.troubles() if tells_troubles else None
        return _json(
            {"status": "ready"}
            if wrong is None
            else {"status": "ready", "well": not wrong, "troubles": wrong}
        )


def _add_tokenization(
    app: FastAPI, sessions: Sessions, models: Models, config: GatewayConfig, bodies: BodyReader
) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await bodies.read(request)
        served = models.of(body)
        limit = await sessions.context_tokens(config.admit_timeout_s, served.name)
        return _written(await served.tokenization.tokenize(body, limit))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await bodies.read(request)
        return _written(await models.of(body).tokenization.detokenize(body))


def _json(content: object) -> Response:
    return _written(orjson.dumps(content))


def _written(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _handle_errors(app: FastAPI) -> None:
    async def on_kvasir_error(request: Request, error: Exception) -> Response:
        known = error if isinstance(error, KvasirError) else InternalError(str(error))
        request.scope[RECORD].error = known
        return refusal(known, request.url.path)

    async def on_http_error(request: Request, error: Exception) -> Response:
        known = _known(error, request) if isinstance(error, HTTPException) else InternalError(str(error))
        request.scope[RECORD].error = known
        headers = error.headers if isinstance(error, HTTPException) else None
        return refusal(known, request.url.path, headers)

    async def on_invalid(request: Request, error: Exception) -> Response:
        return await on_kvasir_error(request, InvalidRequest(str(error)))

    async def on_client_gone(request: Request, error: Exception) -> Response:
        request.scope[RECORD].is_gone = True
        return Response(status_code=CLIENT_GONE_STATUS)

    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(KvasirError, on_kvasir_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_kvasir_error)


def _known(error: HTTPException, request: Request) -> KvasirError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return HttpError(404, f"there is nothing at {where}", error_code="unknown_url")
    if error.status_code == 405:
        return HttpError(405, f"{where} is not allowed", error_code="method_not_allowed")
    return HttpError(error.status_code, str(error.detail), error_code="http_error")
