"""The body of a request that a route of its own reads."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TypeVar

from aiohttp import web

from penstock.protocol.declared import Declared
from penstock.services.frontend.body import body_of, decode_body
from penstock.services.frontend.context import CONTEXT

Body = TypeVar("Body", bound=Declared)
LARGE_BODY_BYTES = 256 * 1024
PAUSE_S = 0.0003
"""Seconds of pause between two slices of a large body: about as long as a slice takes, since both
hold Python's lock and the event loop has to get it in between."""


def let_others_run() -> None:
    time.sleep(PAUSE_S)


async def read_body(request: web.Request, declared: type[Body]) -> Body:
    """The body as it is declared; a large one is read beside the event loop.

    Raises ``ApiError``.
    """
    context = request.app[CONTEXT]
    async with body_of(request, context.config.max_body_bytes, context.bodies) as raw:
        if len(raw) <= LARGE_BODY_BYTES:
            return decode_body(raw, declared)
        decode = partial(decode_body, raw, declared, let_others_run)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(context.large_bodies, decode)
