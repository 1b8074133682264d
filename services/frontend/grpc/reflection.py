"""Reflection (``grpc.reflection.v1alpha``): the standard answers, to a few clients at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from penstock.services.frontend.body import READ_TIMEOUT_S
from penstock.services.frontend.grpc.open_calls import OpenCalls, OpenHandler, asked
from penstock.services.frontend.grpc.receiving import Rpc
from penstock.services.frontend.grpc.sending import send

NAME = reflection.SERVICE_NAME
MAX_CALLS = 16
"""At the same time; a further one gets RESOURCE_EXHAUSTED."""


class Reflection:
    def __init__(self, services: Iterable[str], *, stall_s: float) -> None:
        """stall_s: who takes nothing for so long is given up."""
        self._standard: Any = reflection.aio.ReflectionServicer((*services, NAME))
        self._calls = OpenCalls("ServerReflectionInfo", MAX_CALLS)
        self._stall_s = stall_s

    def methods(self) -> Mapping[str, OpenHandler]:
        return {"ServerReflectionInfo": partial(self._calls.run, self._answer)}

    async def _answer(self, rpc: Rpc) -> None:
        async for answer in self._standard.ServerReflectionInfo(_questions(rpc), rpc):
            await send(rpc, answer.SerializeToString(), self._stall_s)


async def _questions(rpc: Rpc) -> AsyncIterator[pb.ServerReflectionRequest]:
    """Until the client has no more, or asks nothing for ``READ_TIMEOUT_S``."""
    while True:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                raw: Any = await rpc.read()
        except TimeoutError:
            return
        if raw is grpc.aio.EOF:
            return
        yield asked(pb.ServerReflectionRequest, bytes(raw))
