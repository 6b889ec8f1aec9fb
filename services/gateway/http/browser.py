"""CORS, HEAD, and the API description, generated from the request schemas."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from services.gateway.anthropic import MessagesRequest
from services.gateway.openai.fields import DESCRIPTIONS
from services.gateway.openai.responses import ResponseRequest
from services.gateway.openai.schemas import ChatRequest, EmbeddingRequest, TextRequest
from services.gateway.openai.tokenize import DetokenizeTokens, TokenizeChat, TokenizeText

EXPOSED = ["x-request-id", "x-kvasir-request-id", "x-kvasir-ignored", "retry-after"]
_PREFLIGHT_S = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins call the app; without origins return it unchanged."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=_PREFLIGHT_S,
    )


POSTS: Mapping[str, tuple[str, tuple[type[BaseModel], ...]]] = {
    "/v1/chat/completions": ("An answer to a chat, whole or as events", (ChatRequest,)),
    "/v1/completions": ("A text that goes on, whole or as events", (TextRequest,)),
    "/v1/embeddings": ("Vectors of texts", (EmbeddingRequest,)),
    "/v1/responses": ("An answer in OpenAI's newer API, whole or as events", (ResponseRequest,)),
    "/v1/messages": ("An answer in Anthropic's API, whole or as events", (MessagesRequest,)),
    "/v1/messages/count_tokens": ("The tokens of that API's request", (MessagesRequest,)),
    "/tokenize": ("The tokens of a text or a chat", (TokenizeText, TokenizeChat)),
    "/detokenize": ("The text of tokens", (DetokenizeTokens,)),
}
GETS: Mapping[str, str] = {
    "/v1/models": "The models that are served",
    "/v1/models/{model}": "One of them",
    "/v1/responses/{name}": "One that was stored",
    "/v1/responses/{name}/input_items": "The conversation before it",
    "/version": "Of this server",
    "/health": "This process answers",
    "/ping": "The same",
    "/ready": "A request would be answered now",
}
_OPEN = frozenset({"/health", "/ping", "/ready"})
_STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_JSON = ("application/json",)
_BOTH = ("application/json", "text/event-stream")
_STATUSES: Mapping[int, str] = {
    400: "The request is wrong, or asks for what is not there; `param` names the field",
    401: "No key, or a wrong one",
    404: "There is no such model, or no such stored response",
    408: "The body did not arrive in time",
    413: "The body is too long",
    415: "The body is packed in a way that is not read",
    429: "There is too much to do: ask again after `Retry-After` seconds",
    503: "Nobody is there to do it: ask again after `Retry-After` seconds",
    504: "The answer was not complete within `X-Request-Timeout`",
}


def description(version: str, served: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description; `served` holds the model names."""
    schemas: dict[str, Any] = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    paths: dict[str, Any] = {}
    for path, (summary, models) in POSTS.items():
        names = [_add(each, schemas, served) for each in models]
        wanted: dict[str, Any] = (
            {"$ref": names[0]} if len(names) == 1 else {"anyOf": [{"$ref": n} for n in names]}
        )
        body = {"required": True, "content": {"application/json": {"schema": wanted}}}
        kinds = _BOTH if path in _STREAMED else _JSON
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        responses = _responses(kinds, _STATUSES, error)
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": responses}}
    for path, summary in GETS.items():
        found = {429, 503} if path in _OPEN else {401, 429, 503}
        found |= ({404} if "{" in path else set()) | ({400} if path.endswith("input_items") else set())
        statuses = {status: _STATUSES[status] for status in sorted(found)}
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(_JSON, statuses, "Error")}
        if path in _OPEN:
            operation["security"] = []
        if "{" in path:
            name = path[path.index("{") + 1 : path.index("}")]
            wanted = {"type": "string"} | ({"enum": list(served)} if name == "model" else {})
            operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": wanted}]
        paths[path] = {"get": operation}
        if path.endswith("{name}"):
            paths[path]["delete"] = {**operation, "summary": "It is forgotten"}
            paths[f"{path}/cancel"] = {"post": {**operation, "summary": "One in the background ends"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvasir", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _ANY_TEXT = {"type": "string"}, {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_ANY_TEXT, code=_ANY_TEXT))
_MESSAGES_ERROR = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))


def _add(model: type[BaseModel], schemas: dict[str, Any], served: Sequence[str]) -> str:
    found = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= found.pop("$defs", {})
    for name, each in found.get("properties", {}).items():
        each.pop("title", None)
        if name == "model":
            each["enum"] = list(served)
        if name in DESCRIPTIONS:
            each["description"] = DESCRIPTIONS[name]
    schemas[model.__name__] = found
    return f"#/components/schemas/{model.__name__}"


def _responses(kinds: Sequence[str], statuses: Mapping[int, str], error: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    return {
        "200": {"description": "The answer", "content": {kind: {} for kind in kinds}},
        **{str(status): {"description": text, "content": content} for status, text in statuses.items()},
    }


def page(described: Mapping[str, Any]) -> bytes:
    version = html.escape(described["info"]["version"])
    parts = [f"<h1>Kvasir {version}</h1><p>As OpenAPI: <a href=openapi.json>openapi.json</a></p>"]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            parts.append(
                f"<h2><code>{method.upper()} {path}</code></h2><p>{html.escape(operation['summary'])}.</p>"
            )
            parts += [_fields(described, reference) for reference in _references(operation)]
    return _PAGE.replace("{body}", "".join(parts)).encode()


def _references(operation: Mapping[str, Any]) -> list[str]:
    if "requestBody" not in operation:
        return []
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return [each["$ref"] for each in schema.get("anyOf", [schema])]


def _fields(described: Mapping[str, Any], reference: str) -> str:
    schema = described["components"]["schemas"][reference.rsplit("/", 1)[1]]
    rows = [
        f"<tr><td><code>{name}</code>{'*' if name in schema.get('required', ()) else ''}</td>"
        f"<td>{html.escape(each.get('description', ''))}</td></tr>"
        for name, each in schema["properties"].items()
    ]
    return f"<table>{''.join(rows)}</table>"


_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Kvasir</title>"
    "<style>body{font-family:sans-serif;max-width:60em;margin:2em auto}td{padding:.2em .6em}</style>"
    "{body}</html>"
)


def written(version: str, served: Sequence[str]) -> tuple[bytes, bytes]:
    """Return the bodies of `/openapi.json` and `/docs`."""
    described = description(version, served)
    return orjson.dumps(described), page(described)
