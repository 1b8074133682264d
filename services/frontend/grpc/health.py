"""The standard health service (``grpc.health.v1.Health``): of the server, its services and each
model by its names.

A status is SERVING while a request would be served, and NOT_SERVING once and for all when the
server goes down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1._async import HealthServicer

from penstock.client.gateway_interface import Gateway

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING


class Health:
    def __init__(self, gateway: Gateway, services: Iterable[str]) -> None:
        self.servicer = _Servicer(self)
        self._gateway = gateway
        self._services = ("", *services)
        self._told: dict[str, pb.HealthCheckResponse.ServingStatus] = {}
        self._telling: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Tell those who watch what has changed. Call it a few times a second."""
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self.tell())

    async def tell(self) -> None:
        """Tell what has changed."""
        for name, status in self._statuses().items():
            if self._told.get(name) != status:
                self._told[name] = status
                await self.servicer.set(name, status)

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


class _Servicer(HealthServicer):  # type: ignore[misc]
    """The standard one, which is told anew before it answers a question."""

    def __init__(self, health: Health) -> None:
        super().__init__()
        self._health = health

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._health.tell()
        return await super().Check(request, context)
