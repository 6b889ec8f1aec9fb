"""A collector of OpenTelemetry spans: an HTTP server that reads OTLP's protobuf, and what it was sent."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.patience import PATIENCE_S, wait_until


@dataclass(frozen=True)
class Sent:
    """One span, as it came over the wire."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    is_error: bool


class Collector:
    """`refuses`: every batch is answered with 503."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []
        self.requests, self.refuses = 0, False
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                if self.path != "/v1/traces" or collector.refuses:
                    self.send_response(503 if collector.refuses else 404)
                else:
                    if self.headers.get("Content-Encoding") == "gzip":
                        body = gzip.decompress(body)
                    collector.spans += _read(ExportTraceServiceRequest.FromString(body))
                    self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._serving = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def of(self, trace_id: str) -> list[Sent]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def until(self, trace_id: str, *names: str, within_s: float = PATIENCE_S) -> list[Sent]:
        """The trace, once each of these names is in it."""
        wait_until(lambda: set(names) <= {span.name for span in self.of(trace_id)}, within_s)
        return self.of(trace_id)

    @contextmanager
    def serving(self) -> Iterator["Collector"]:
        self._serving.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._serving.join(PATIENCE_S)


def _read(request: ExportTraceServiceRequest) -> list[Sent]:
    found = []
    for batch in request.resource_spans:
        resource = {each.key: _value(each.value) for each in batch.resource.attributes}
        found += [
            Sent(
                service=resource["service.name"],
                instance=resource["service.instance.id"],
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=span.kind,
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                attributes={each.key: _value(each.value) for each in span.attributes},
                events=tuple(event.name for event in span.events),
                is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            )
            for scope in batch.scope_spans
            for span in scope.spans
        ]
    return found


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(kind))
