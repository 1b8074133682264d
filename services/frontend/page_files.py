"""The files of a page, served from memory.

They are read once, at import, and served by name: no path of a client ever reaches the file system.
The policy lets a page load nothing from elsewhere and run no inline script (CSP level 3,
https://www.w3.org/TR/CSP3/; Trusted Types, https://www.w3.org/TR/trusted-types/).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from aiohttp import ETag, web
from aiohttp.typedefs import Handler

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFile(msgspec.Struct, frozen=True):
    body: bytes
    content_type: str
    etag: str


class PageFiles:
    """The files of one folder beside this module."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self._files: dict[str, PageFile] = {}
        for name in names:
            body = (Path(__file__).with_name(folder) / name).read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:16]
            self._files[name] = PageFile(body, TYPES[Path(name).suffix], etag)

    def handler(self, name: str) -> Handler:
        page_file = self._files[name]

        async def file(request: web.Request) -> web.Response:
            return _response(request, page_file)

        return file


def _response(request: web.Request, page_file: PageFile) -> web.Response:
    known = request.if_none_match or ()
    if any(tag.value == page_file.etag for tag in known):
        response = web.Response(status=304, headers=_HEADERS)
    else:
        response = web.Response(
            body=page_file.body,
            content_type=page_file.content_type,
            charset="utf-8",
            headers=_HEADERS,
        )
    response.etag = ETag(page_file.etag)
    return response
