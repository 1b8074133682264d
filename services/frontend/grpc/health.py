"""The standard health service (``grpc.health.v1.Health``): of the server, its services and each
model by its names.

A status is SERVING while a request would be served, and NOT_SERVING once and for all when the
server goes down. Nobody who watches holds up another, or what tells them: each has what changed
from the last statuses, when it comes to take it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

from grpc_health.v1 import health_pb2 as pb

from penstock.client.gateway_interface import Gateway
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.grpc.open_calls import OpenCalls, OpenHandler, asked
from penstock.services.frontend.grpc.receiving import Receiving, Rpc, places_for
from penstock.services.frontend.grpc.sending import send

NAME = pb.DESCRIPTOR.services_by_name["Health"].full_name
SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN
MAX_WATCHES = 256
"""At the same time; a further one gets RESOURCE_EXHAUSTED."""
MAX_CHECKS = 1024
"""Likewise."""
PATIENCE_SECONDS = 0.1
"""A question that others wait for has so long: it is a name, which comes with its call."""


class Health:
    def __init__(
        self, gateway: Gateway, services: Iterable[str], *, stall_s: float, message_bytes: int
    ) -> None:
        """stall_s: who takes nothing for so long is given up. message_bytes: what gRPC takes for
        one message of a client."""
        self.watches = OpenCalls("Watch", MAX_WATCHES)
        self._checks = OpenCalls("Check", MAX_CHECKS)
        self._receiving = Receiving(places_for(message_bytes), PATIENCE_SECONDS)
        self._stall_s = stall_s
        self._gateway = gateway
        self._services = ("", *services)
        self._told: dict[str, pb.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()

    def methods(self) -> Mapping[str, OpenHandler]:
        return {
            "Check": partial(self._checks.run, self._check),
            "Watch": partial(self.watches.run, self._watch),
        }

    def look(self) -> None:
        """Tell those who watch what has changed. Call it a few times a second."""
        found = self._statuses()
        if found == self._told:
            return
        self._told = found
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _check(self, rpc: Rpc) -> None:
        service = await self._asked(rpc)
        self.look()
        status = self._told.get(service)
        if status is None:
            raise ApiError(404, "There is no service or model of this name")
        await self._answer(rpc, status)

    async def _watch(self, rpc: Rpc) -> None:
        service = await self._asked(rpc)
        self.look()
        last = None
        while True:
            changed, status = self._changed, self._told.get(service, UNKNOWN)
            if status == last:
                await changed.wait()
                continue
            await self._answer(rpc, status)
            last = status

    async def _asked(self, rpc: Rpc) -> str:
        raw = await self._receiving.message(rpc)
        return str(asked(pb.HealthCheckRequest, raw).service)

    async def _answer(self, rpc: Rpc, status: pb.HealthCheckResponse.ServingStatus) -> None:
        await send(rpc, pb.HealthCheckResponse(status=status).SerializeToString(), self._stall_s)

    def _statuses(self) -> dict[str, pb.HealthCheckResponse.ServingStatus]:
        gateway = self._gateway
        if gateway.draining():
            return dict.fromkeys((*self._services, *self._told), NOT_SERVING)
        whole = gateway.ready()
        found = dict.fromkeys(self._services, SERVING if whole.ready else NOT_SERVING)
        for model in gateway.models():
            status = SERVING if gateway.ready(model.name).ready else NOT_SERVING
            found |= dict.fromkeys((model.name, *model.aliases), status)
        return found
