"""The router's process: what it does as soon as it hears of something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.protocol.config import ClusterConfig, Config
from penstock.protocol.wire import codec
from penstock.protocol.wire.messages.membership import (
    Beat,
    Capacity,
    Hello,
    Identity,
    MetricsReport,
    Phase,
)
from penstock.protocol.wire.messages.requests import Enqueue, first_attempt
from penstock.services.router.dispatch import YOUNG_SECONDS
from penstock.services.router.service import RouterService

encode = msgspec.msgpack.encode


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterService]:
    tmp_path.chmod(0o700)
    service = RouterService(Config(cluster=ClusterConfig(router=f"ipc://{tmp_path}/router.sock")))
    yield service
    service.mailbox.close()


def beat(router: RouterService, phase: str, folder: Path, now: float) -> None:
    metrics = encode(MetricsReport([]))
    about = 1, phase, "", 1, 0.0, 0.0, 0, Capacity(), metrics, 10**6
    router.handle(1, Beat(f"ipc://{folder}/engine.sock", *about), now)
    router.after_messages(now)


def test_a_request_that_waits_goes_to_an_engine_as_soon_as_that_is_ready(
    router: RouterService, tmp_path: Path
) -> None:
    now = time.monotonic() + 2 * YOUNG_SECONDS
    engine = f"ipc://{tmp_path}/engine.sock"
    identity = encode(Identity(1, "host"))
    versions = codec.PROTOCOL_VERSION, codec.SCHEMA_HASH
    router.handle(1, Hello("scheduler", engine, 1, *versions, identity), now)
    beat(router, Phase.LOADING, tmp_path, now)
    again = first_attempt(1) + 1
    router.on_message(2, Enqueue(1, again, f"ipc://{tmp_path}/t.sock", b"work"), now)
    router.after_messages(now)
    assert len(router.dispatcher.held) == 1
    beat(router, Phase.READY, tmp_path, now + 0.001)
    assert (len(router.dispatcher.held), router.dispatcher.routed) == (0, 1)
