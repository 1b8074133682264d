"""Reflection (``grpc.reflection.v1`` and ``v1alpha``): the standard answers, to a few clients at a
time.

The two differ in the name of their package alone, so one servicer, grpcio's of ``v1alpha``, answers
both. Newer clients ask ``v1`` first, and some know no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from penstock.services.frontend.body import READ_TIMEOUT_S
from penstock.services.frontend.grpc.open_calls import OpenCalls, OpenHandler, asked
from penstock.services.frontend.grpc.receiving import Rpc
from penstock.services.frontend.grpc.sending import send

NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
MAX_CALLS = 16
"""At the same time, by either name; a further one gets RESOURCE_EXHAUSTED."""


class Reflection:
    def __init__(self, services: Iterable[str], *, stall_s: float) -> None:
        """stall_s: who takes nothing for so long is given up."""
        _describe_v1()
        self._standard: Any = reflection.aio.ReflectionServicer((*services, *NAMES))
        self._calls = OpenCalls("ServerReflectionInfo", MAX_CALLS)
        self._stall_s = stall_s

    def methods(self) -> Mapping[str, OpenHandler]:
        return {"ServerReflectionInfo": partial(self._calls.run, self._answer)}

    async def _answer(self, rpc: Rpc) -> None:
        async for answer in self._standard.ServerReflectionInfo(_questions(rpc), rpc):
            await send(rpc, answer.SerializeToString(), self._stall_s)


def _describe_v1() -> None:
    """Let ``v1`` be found among the descriptors of this process."""
    pool, alpha = descriptor_pool.Default(), descriptor_pb2.FileDescriptorProto()
    try:
        pool.FindFileContainingSymbol(NAMES[0])
    except KeyError:
        pb.DESCRIPTOR.CopyToProto(alpha)
        alpha.ClearField("options")  # packages in other languages, and that it is deprecated
        renamed = text_format.MessageToString(alpha).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()))


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
