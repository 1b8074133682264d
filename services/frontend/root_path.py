"""Paths below a prefix, where a proxy passes them on as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp.http_parser import RawRequestMessage
from yarl import URL

RequestFactory = Callable[..., Any]


def below(root: str, make: RequestFactory) -> RequestFactory:
    """Makes requests whose targets have lost ``root`` (``/llm``), if they had it. Without it they
    are served as well: probes and clients within know no prefix."""
    if not root:
        return make

    def made(message: RawRequestMessage, *rest: Any) -> Any:
        target = message.path
        left = target[len(root) :]
        if target.startswith(root) and left[:1] in ("", "/", "?"):
            if not left.startswith("/"):
                left = f"/{left}"
            path, _, query = left.partition("?")
            url = URL.build(path=path, query_string=query, encoded=True)
            message = message._replace(path=left, url=url)
        return make(message, *rest)

    return made
