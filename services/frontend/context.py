"""What every handler of one application needs, under one typed key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from penstock.client.gateway_interface import Gateway
from penstock.client.meters import Meters
from penstock.protocol.config.api_keys import read_api_keys
from penstock.protocol.config.fields import ServerConfig
from penstock.protocol.process.metrics import Registry
from penstock.services.frontend.access import ApiKeys
from penstock.services.frontend.body import BodyBudget
from penstock.services.frontend.browsers import Browsers
from penstock.services.frontend.dialects.interface import Dialect, paths_of
from penstock.services.frontend.running import RunningRequests
from penstock.services.frontend.stream import STALL_S, StreamClock

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
        self.keys = ApiKeys(read_api_keys(config.api_key))
        self.browsers = Browsers(config)
        self.bodies = BodyBudget(max(BODY_BYTES, config.max_body_bytes))
        self.large_bodies = ThreadPoolExecutor(1, "large-body")
        """Parses what would hold up the event loop, one body at a time."""
        self.running = RunningRequests()
        self.clock = StreamClock(config.keep_alive_comment_s, stall_s=stall_s)
        self.created = int(time.time())
        self.active = 0
        """HTTP requests that a handler is busy with."""


CONTEXT = web.AppKey("context", Context)
TENANT = web.RequestKey("tenant", str)
REQUEST_ID = web.RequestKey("request_id", str)
TRACE = web.RequestKey("trace", str)
"""The client's ``traceparent``; empty: there is none."""
