"""The body of a request that a route of its own reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from penstock.protocol.declared import Declared
from penstock.services.frontend.body import Pause, body_of, decode_body, no_pause
from penstock.services.frontend.context import CONTEXT, Context

Body = TypeVar("Body", bound=Declared)
Found = TypeVar("Found")
LARGE_BODY_BYTES = 256 * 1024
PAUSE_S = 0.0003
"""Seconds of pause between two slices of a large body: about as long as a slice takes, since both
hold Python's lock and the event loop has to get it in between."""


def let_others_run() -> None:
    time.sleep(PAUSE_S)


async def beside(context: Context, size: int, read: Callable[[Pause | None], Found]) -> Found:
    """What ``read`` makes of so many bytes; of many it does so beside the event loop, with
    pauses."""
    if size <= LARGE_BODY_BYTES:
        return read(None)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(context.large_bodies, read, let_others_run)


async def read_body(request: web.Request, declared: type[Body]) -> Body:
    """The body as it is declared; a large one is read beside the event loop.

    Raises ``ApiError``.
    """
    context = request.app[CONTEXT]
    async with body_of(request, context.config.max_body_bytes, context.bodies) as raw:
        return await beside(
            context, len(raw), lambda pause: decode_body(raw, declared, pause or no_pause)
        )
