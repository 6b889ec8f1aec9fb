"""A POST to a known path goes straight to its handler, everything else to the application."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.body import ClientGone
from services.gateway.http.middleware import CLIENT_GONE_STATUS, RECORD
from services.gateway.http.request_log import RequestRecord
from services.gateway.http.routes import Shortcut


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("application")(scope, receive, send)


async def echo(request: Request) -> Response:
    body = await request.body()
    if body == b"gone":
        raise ClientGone
    return PlainTextResponse(body)


async def asked(method: str, path: str, body: bytes = b"") -> tuple[int, bytes, RequestRecord]:
    record = RequestRecord(method, path, None)
    scope = {"type": "http", "method": method, "path": path, "headers": [], RECORD: record}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await Shortcut(application, {"/echo": echo})(scope, receive, send)
    return sent[0]["status"], sent[1]["body"], record


async def test_only_a_post_to_a_known_path_is_short() -> None:
    assert (await asked("POST", "/echo", b"hello"))[:2] == (200, b"hello")
    assert (await asked("GET", "/echo"))[:2] == (200, b"application")
    assert (await asked("POST", "/echo/"))[:2] == (200, b"application")


async def test_a_client_that_left_is_noted() -> None:
    status, _, record = await asked("POST", "/echo", b"gone")
    assert status == CLIENT_GONE_STATUS and record.is_gone
