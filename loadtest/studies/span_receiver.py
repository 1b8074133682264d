"""A collector of spans that does next to nothing, in a process of its own: it keeps what comes and
counts it when it is asked to, so that its work is not measured along with the server's."""

from __future__ import annotations

import contextlib
import multiprocessing
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection


def _serve(told: Connection) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(b"")

        def do_GET(self) -> None:
            count = 0
            while bodies:
                request = ExportTraceServiceRequest.FromString(bodies.pop())
                scopes = (scope for one in request.resource_spans for scope in one.scope_spans)
                count += sum(len(scope.spans) for scope in scopes)
            self._answer(str(count).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.send(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def span_receiver() -> Iterator[str]:
    """Its URL, for ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the end of a process that fails to start is told here
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def spans_since(url: str) -> int:
    """How many have come since this was asked last."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return int(answer.read())
