"""A server of the OpenAI API that says what it is told to, for texts that no model can be made to
write."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedApi:
    """Answers every request with ``deltas``; ``asked`` holds path, headers and body of each."""

    def __init__(self) -> None:
        self.deltas: list[dict[str, Any]] = []
        self.whole: dict[str, Any] = {}
        """Answers that are not streamed, by path."""
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.go_on = threading.Event()
        """Cleared, an answer waits after its first delta."""
        self.go_on.set()
        self.status = 200
        """Another than 200 refuses every question."""
        self.url = ""


def _handler(api: ScriptedApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path in api.whole:
                self._whole(api.whole[self.path])
                return
            self._whole({"object": "list", "data": [{"id": "scripted", "max_model_len": 100}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            api.asked.append((self.path, dict(self.headers), body))
            if api.status != 200:
                self._whole({"error": {"message": "the script says no"}}, api.status)
                return
            if self.path in api.whole:
                self._whole(api.whole[self.path])
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for number, delta in enumerate(api.deltas):
                if number == 1:
                    api.go_on.wait(60)
                name = "text" if self.path.endswith("/completions") and "text" in delta else "delta"
                part = delta["text"] if name == "text" else delta
                event = {"choices": [{"index": 0, name: part, "finish_reason": None}]}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def _whole(self, body: Any, status: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


@contextlib.contextmanager
def scripted_api() -> Iterator[ScriptedApi]:
    api = ScriptedApi()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(api))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        api.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
