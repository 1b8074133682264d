"""A collector of OpenTelemetry: an HTTP server that decodes what OTLP exporters post."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """One span."""

    name: str
    process: str
    service: str
    trace: str
    id: str
    parent: str
    begun: int
    ended: int
    attributes: dict[str, Any]
    failed: bool
    dropped: int
    """How many attributes."""


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind) if kind else None
    return [_value(one) for one in found.values] if kind == "array_value" else found


def _facts(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


class Collector:
    """What has been received so far."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []
        self.came = threading.Condition()
        self.url = ""

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.came:
            self.headers.append(headers)
            for group in request.resource_spans:
                resource = _facts(group.resource.attributes)
                for scope in group.scope_spans:
                    self.spans += [
                        Received(
                            span.name,
                            resource["penstock.process"],
                            resource["service.name"],
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _facts(span.attributes),
                            span.status.code == 2,
                            span.dropped_attributes_count,
                        )
                        for span in scope.spans
                    ]
            self.came.notify_all()

    def of(self, trace: str) -> list[Received]:
        return [span for span in self.spans if span.trace == trace]

    def await_names(self, trace: str, names: set[str], seconds: float = 60.0) -> list[Received]:
        """The spans of a trace once these are among them."""
        with self.came:
            whole = self.came.wait_for(
                lambda: names <= {span.name for span in self.of(trace)}, seconds
            )
            assert whole, [(span.name, span.process, span.trace) for span in self.spans]
            return self.of(trace)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at a free port of this host."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path.endswith("/v1/traces")  # a proxy is asked for a whole URL
            collector.take(body, dict(self.headers))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
