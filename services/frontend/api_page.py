"""The description of the API: as JSON, and as a page that reads it.

Neither needs a key: they say what this software can do, and nothing of who uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import cached_property

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.services.frontend.bodies.routes import JSON, SERVER_ROUTES, RouteBodies
from penstock.services.frontend.dialects.interface import Dialect, bodies_of
from penstock.services.frontend.openapi import describe
from penstock.services.frontend.page_files import PageFiles

INDEX = "docs.html"
FILES = (INDEX, "docs.css", "docs.js", "fields.js")
_PAGE = PageFiles("docs_page", FILES)


def described(dialects: Sequence[Dialect]) -> list[RouteBodies]:
    """What every route takes and gives, but for the files of pages."""
    return [*(one for dialect in dialects for one in bodies_of(dialect)), *SERVER_ROUTES]


class Description:
    """The description of one application, made when it is first asked for."""

    def __init__(
        self, dialects: Sequence[Dialect], open_paths: Collection[str], *, with_keys: bool
    ) -> None:
        self._dialects = dialects
        self._open_paths = open_paths
        self._with_keys = with_keys

    @cached_property
    def encoded(self) -> bytes:
        found = describe(described(self._dialects), self._open_paths, with_keys=self._with_keys)
        return msgspec.json.encode(found)


DESCRIPTION = web.AppKey("description", Description)


async def description(request: web.Request) -> web.Response:
    made = request.app[DESCRIPTION]
    body = await asyncio.to_thread(lambda: made.encoded)  # the first time takes 0.1 s
    return web.Response(body=body, content_type=JSON)


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/openapi.json", description),
    ("GET", "/docs", _PAGE.handler(INDEX)),
    *(("GET", f"/docs/{name}", _PAGE.handler(name)) for name in FILES if name != INDEX),
)
OPEN_ROUTES = frozenset(path for _, path, _ in ROUTES)
