"""Routes `/v1/files` and `/v1/batches`, as OpenAI has them."""

from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from services.gateway.batches.runner import ENDPOINTS
from services.gateway.batches.store import MOST_LISTED, WINDOW_S, BatchStore, File, StoredBatch
from services.gateway.errors import shown
from services.gateway.http.middleware import RECORD
from services.gateway.http.reading import ReadBody
from services.gateway.http.stored import written_json
from shared.errors import InvalidRequest

_PURPOSES = ("batch", "batch_output")
_MOST_METADATA_BYTES = 8192


class _Asked(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


_asked = msgspec.json.Decoder(_Asked).decode


def add_batches(app: FastAPI, store: BatchStore, read: ReadBody) -> None:
    """Add the routes."""

    def key_of(request: Request) -> str:
        return str(request.scope[RECORD].tenant)

    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        body = await read(request)
        name, purpose, content = read_form(request.headers.get("content-type", ""), body)
        return _json(file_object(await store.add_file(key_of(request), name, purpose, content)))

    @app.get("/v1/files")
    async def files(request: Request) -> Response:
        found = await store.files(key_of(request), request.query_params.get("purpose"))
        return _json({"object": "list", "data": [file_object(each) for each in found], "has_more": False})

    @app.get("/v1/files/{name}")
    async def file(name: str, request: Request) -> Response:
        return _json(file_object(await store.file(key_of(request), name)))

    @app.get("/v1/files/{name}/content")
    async def content(name: str, request: Request) -> Response:
        return Response(await store.content(key_of(request), name), media_type="application/jsonl")

    @app.delete("/v1/files/{name}")
    async def delete(name: str, request: Request) -> Response:
        await store.delete_file(key_of(request), name)
        return _json({"id": name, "object": "file", "deleted": True})

    @app.post("/v1/batches")
    async def begin(request: Request) -> Response:
        asked = _read_asked(await read(request))
        metadata = orjson.dumps(asked.metadata or {})
        if len(metadata) > _MOST_METADATA_BYTES:
            text = f"metadata should be at most {_MOST_METADATA_BYTES} bytes"
            raise InvalidRequest(text, param="metadata")
        found = await store.begin(key_of(request), asked.input_file_id, asked.endpoint, metadata.decode())
        return _json(batch_object(found))

    @app.get("/v1/batches")
    async def batches(request: Request) -> Response:
        limit = request.query_params.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= MOST_LISTED:
            raise InvalidRequest(f"limit should be from 1 to {MOST_LISTED}", param="limit")
        after = request.query_params.get("after")
        found = await store.batches(key_of(request), after, int(limit) + 1)
        data = [batch_object(each) for each in found[: int(limit)]]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return _json({"object": "list", "data": data, **ends, "has_more": len(found) > int(limit)})

    @app.get("/v1/batches/{name}")
    async def batch(name: str, request: Request) -> Response:
        return _json(batch_object(await store.batch(key_of(request), name)))

    @app.post("/v1/batches/{name}/cancel")
    async def cancel(name: str, request: Request) -> Response:
        return _json(batch_object(await store.cancel(key_of(request), name)))


def read_form(content_type: str, body: bytes) -> tuple[str, str, bytes]:
    """Return name, purpose and content of an upload (`multipart/form-data`). Raises InvalidRequest."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidRequest("send multipart/form-data with the fields purpose and file", param="file")
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    form = BytesParser(policy=HTTP).parsebytes(head + body)
    name, purpose, content = "", "", None
    for part in form.iter_parts() if form.is_multipart() else ():
        field = part.get_param("name", header="content-disposition")
        value = part.get_payload(decode=True)
        if field == "file" and isinstance(value, bytes):
            name, content = part.get_filename() or "file.jsonl", value
        elif field == "purpose" and isinstance(value, bytes):
            purpose = value.decode("utf-8", "replace").strip()
    if content is None:
        raise InvalidRequest("the form has no field file", param="file")
    if purpose not in _PURPOSES[:1]:
        raise InvalidRequest(f"purpose should be batch, not {shown(purpose, 64)!r}", param="purpose")
    return name[:200], purpose, content


def _read_asked(body: bytes) -> _Asked:
    try:
        asked = _asked(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"a batch is input_file_id, endpoint, completion_window: {error}") from None
    if asked.endpoint not in ENDPOINTS:
        text = f"endpoint should be one of {', '.join(ENDPOINTS)}"
        raise InvalidRequest(text, param="endpoint")
    if asked.completion_window != "24h":
        raise InvalidRequest("completion_window should be 24h", param="completion_window")
    return asked


def file_object(file: File) -> dict[str, Any]:
    """Return a file as the API shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_s),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def batch_object(batch: StoredBatch) -> dict[str, Any]:
    """Return a batch as the API shows it."""
    ended = {f"{state}_at": None for state in ("completed", "failed", "expired", "cancelled")}
    if batch.ended_s is not None:
        ended[f"{batch.state}_at"] = int(batch.ended_s)  # type: ignore[assignment]
    problems = orjson.loads(batch.problems) if batch.problems else []
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input,
        "completion_window": "24h",
        "status": batch.state,
        "output_file_id": batch.output,
        "error_file_id": batch.errors,
        "created_at": int(batch.created_s),
        "in_progress_at": None if batch.began_s is None else int(batch.began_s),
        "expires_at": int(batch.created_s + WINDOW_S),
        "finalizing_at": None,
        "cancelling_at": None,
        **ended,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": orjson.loads(batch.metadata) or None,
    }


def _json(content: object) -> Response:
    return written_json(orjson.dumps(content))
