"""Straight from the edge to the completion routes: frameworks' middleware and matching are for the rest.

Errors are left to the edge, as everywhere. Knows paths and their handlers, nothing of what these do.
"""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.body import ClientGone
from services.gateway.edge import CLIENT_GONE_STATUS, RECORD

Handler = Callable[[Request], Awaitable[Response]]


class Shortcut:
    """Wraps the application: a POST to one of the paths goes to its handler, everything else on."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Handler]) -> None:
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
