"""What every handler of one application needs, under one typed key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from penstock.client.gateway_interface import Gateway, ServedModel
from penstock.client.meters import Meters
from penstock.protocol.config.api_keys import read_api_keys
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process.metrics import Registry
from penstock.services.frontend.access import ApiKeys
from penstock.services.frontend.awaited_adapters import AwaitedAdapters
from penstock.services.frontend.body import BodyBudget
from penstock.services.frontend.browsers import Browsers
from penstock.services.frontend.dialects.interface import Dialect, paths_of
from penstock.services.frontend.forwarded import TrustedProxies
from penstock.services.frontend.keys.gate import Gate
from penstock.services.frontend.keys.key_table import KeyTable
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.limits import Limits
from penstock.services.frontend.keys.shared_limits import SharedLimits
from penstock.services.frontend.requests.history import History
from penstock.services.frontend.running import RunningRequests
from penstock.services.frontend.stream import STALL_S, StreamClock
from penstock.services.frontend.valkey_address import read_address
from penstock.services.frontend.websockets.open_sessions import OpenSessions

BODY_BYTES = 512 * 1024 * 1024
"""All request bodies that are being read or parsed in one process."""


class Context:
    def __init__(
        self,
        config: ServerConfig,
        gateway: Gateway,
        registry: Registry,
        dialects: Sequence[Dialect],
        stall_s: float = STALL_S,
    ) -> None:
        self.config = config
        self.gateway = gateway
        self.registry = registry
        self.dialects = {path: dialect for dialect in dialects for path in paths_of(dialect)}
        """Each dialect by the paths that it serves."""
        self.meters = Meters(registry)
        table = KeyTable(Path(config.keys_file).expanduser()) if config.keys_file else None
        self.keys = ApiKeys(read_api_keys(config.api_key), table)
        shared = None
        if config.limits_url:
            shared = SharedLimits(read_address(config.limits_url, "--limits-url"))
        self.limits = Limits(registry, self._frontends, shared)
        self.history = History()
        self.gate = Gate(self.keys, gateway, self.limits, self.history)
        self.browsers = Browsers(config)
        self.proxies = TrustedProxies(config.trusted_proxies)
        self.bodies = BodyBudget(max(BODY_BYTES, config.max_body_bytes))
        self.large_bodies = ThreadPoolExecutor(1, "large-body")
        """Parses what would hold up the event loop, one body at a time."""
        self.running = RunningRequests()
        self.awaited = AwaitedAdapters()
        self.sockets = OpenSessions()
        """WebSockets."""
        self.clock = StreamClock(config.keep_alive_comment_s, stall_s=stall_s)
        self.created = int(time.time())
        self.active = 0
        """HTTP requests that a handler is busy with."""

    def _frontends(self) -> int:
        """How many the server has."""
        return sum(peer.service == "frontend" for peer in self.gateway.members()) or 1


CONTEXT = web.AppKey("context", Context)
KEY = web.RequestKey("key", KnownKey)
TENANT = web.RequestKey("tenant", str)
REQUEST_ID = web.RequestKey("request_id", str)
TRACE = web.RequestKey("trace", str)
"""The client's ``traceparent``; empty: there is none."""


def models_for(request: web.Request) -> list[ServedModel]:
    """The served models that the caller may use."""
    return request[KEY].of_its_own(request.app[CONTEXT].gateway.models())
