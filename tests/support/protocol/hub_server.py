"""A small Hugging Face hub on this host: repositories of files, as its client asks for them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """``repositories``: content by file name, by repository. ``gated``: files are refused."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.served: list[str] = []
        """Files that were downloaded, with the byte that each download began at."""
        self.broken_after: dict[str, int] = {}
        """Connections of these files break once, after so many bytes."""
        self.url = ""


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/"):
                self._about(path.removeprefix("/api/models/"))
            else:
                name, _, rest = path.removeprefix("/").partition("/resolve/")
                self._file(name, rest.partition("/")[2])

        def _about(self, rest: str) -> None:
            name = "/".join(rest.split("/")[:2])
            files = hub.repositories.get(name)
            if files is None:
                self._refuse(404, "RepoNotFound")
            elif "/tree/" in rest:
                tree = [
                    {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
                    for file, data in files.items()
                ]
                self._json(tree)
            else:
                siblings = [{"rfilename": file, "size": len(files[file])} for file in files]
                self._json({"id": name, "sha": COMMIT, "siblings": siblings})

        def _file(self, name: str, file: str) -> None:
            if name in hub.gated:
                self._refuse(403, "GatedRepo")
                return
            data = hub.repositories.get(name, {}).get(file)
            if data is None:
                self._refuse(404, "EntryNotFound")
                return
            begin = 0
            if asked := self.headers.get("Range"):
                begin = int(asked.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{_etag(data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - begin))
            self.end_headers()
            if self.command == "HEAD":
                return
            hub.served.append(f"{file}@{begin}")
            if (cut := hub.broken_after.pop(file, None)) is not None:
                self.wfile.write(data[begin:cut])
                self.wfile.flush()
                self.connection.close()
                raise ConnectionError("broken on purpose")
            self.wfile.write(data[begin:])

        def _json(self, tree: object) -> None:
            body = json.dumps(tree).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
