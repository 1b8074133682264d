"""The routes that load and unload adapters, before a launcher and engines that are scripted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.frontend.frontend_scripted import Client, run
from support.frontend.key_files import Keys

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.wire.messages.administration import (
    ADMIT_ADAPTER,
    FORGET_ADAPTER,
    KEEP_ADAPTER,
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    AdapterAnswer,
    AdapterPlace,
    AdapterProgress,
)
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase
from penstock.services.frontend.requests import adapter_routes
from penstock.services.frontend.requests.adapter_routes import LOAD, UNLOAD

encode = msgspec.msgpack.encode
SOUND = AdapterProgress("loaded", "d1")
BROKEN = AdapterProgress("failed", reason="a tensor is missing")


class Server:
    """A launcher, and engines that say how far they are with a load."""

    def __init__(self, *engines: AdapterProgress, kept: str = "") -> None:
        self.engines, self.kept = engines, kept
        self.asked: list[str] = []
        self.on_loaded: Callable[[], None] = lambda: None

    async def ask(self, service: str, what: str, about: bytes) -> list[bytes]:
        self.asked.append(what)
        if service == "scheduler":
            if what == LOAD_ADAPTER:
                self.on_loaded()
            return [encode(one) for one in self.engines]
        place = msgspec.msgpack.decode(about, type=AdapterPlace)
        if what == FORGET_ADAPTER and place.load:
            self.asked[-1] += " of that load"
        return [encode(AdapterAnswer("/a/one" if what == ADMIT_ADAPTER else self.kept))]

    def peers(self) -> list[Peer]:
        services = ("launcher", *("scheduler" for _ in self.engines))
        return [
            Peer(service, "", number, Identity(number, "host"), Phase.READY, "", Capacity(), 0)
            for number, service in enumerate(services, 1)
        ]


def posted(
    tmp_path: Path, server: Server, path: str, body: dict[str, Any], *, known: str = ""
) -> tuple[int, str]:
    """known: digest of the adapter that is served before."""
    tmp_path.mkdir(exist_ok=True)
    keys, found = Keys(tmp_path), list[tuple[int, str]]()
    root = keys.add("root", "admin")

    async def act(client: Client) -> None:
        gateway: Any = client.gateway
        gateway.peers, gateway.ask = server.peers(), server.ask

        def serve(digest: str) -> None:
            adapters = [Adapter("mill", digest)]
            gateway.served = [ServedModel("mill", [], 64, 99, adapters=adapters, parent="base")]

        if known:
            serve(known)
        if all(one.state == "loaded" for one in server.engines):
            server.on_loaded = lambda: serve("d1")
        async with client.session.post(client.url + path, json=body, headers=root) as response:
            found.append((response.status, await response.text()))

    run(act, config=keys.config)
    return found[0]


BODY = {"lora_name": "mill", "lora_path": "one"}


def test_workers_that_start_during_a_load_have_the_adapter(tmp_path: Path) -> None:
    server = Server(SOUND, SOUND)
    assert posted(tmp_path, server, LOAD, BODY)[0] == 200
    assert server.asked == [ADMIT_ADAPTER, KEEP_ADAPTER, LOAD_ADAPTER]


def test_a_load_that_fails_is_taken_back_everywhere(tmp_path: Path) -> None:
    server = Server(SOUND, BROKEN)
    status, text = posted(tmp_path, server, LOAD, BODY)
    assert status == 400 and "a tensor is missing" in text
    assert server.asked[2:] == [LOAD_ADAPTER, UNLOAD_ADAPTER, f"{FORGET_ADAPTER} of that load"]


def test_a_replacement_that_some_engines_have_says_so(tmp_path: Path) -> None:
    server = Server(SOUND, BROKEN)
    body = {**BODY, "load_inplace": True}
    status, text = posted(tmp_path, server, LOAD, body, known="d0")
    assert status == 400 and "1 of 2 engines have the new one already" in text
    assert server.asked[2:] == [LOAD_ADAPTER, f"{FORGET_ADAPTER} of that load"]


class ServerThatStartsAgain(Server):
    """A scheduler of one of two engines is gone, and there again at the third look."""

    def peers(self) -> list[Peer]:
        worker = Identity(7, "host", "engine-1")
        return [*super().peers(), Peer("worker", "", 7, worker, Phase.READY, "", Capacity(), 0)]

    async def ask(self, service: str, what: str, about: bytes) -> list[bytes]:
        if self.asked.count(LOAD_ADAPTER) == 2:
            self.engines = (SOUND, SOUND)
        return await super().ask(service, what, about)


def test_a_load_is_over_once_an_engine_whose_scheduler_starts_again_has_it(tmp_path: Path) -> None:
    """Else its worker would go on with the former one of that name."""
    server = ServerThatStartsAgain(SOUND)
    body = {**BODY, "load_inplace": True}
    assert posted(tmp_path, server, LOAD, body, known="d0")[0] == 200
    assert server.asked.count(LOAD_ADAPTER) == 3


def test_an_engine_whose_scheduler_does_not_come_again_ends_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_routes, "SILENT_SECONDS", 0.0)
    status, text = posted(tmp_path, ServerThatStartsAgain(SOUND), LOAD, BODY)
    assert status == 503 and "Not every engine answered" in text


def test_who_does_not_hear_in_time_is_not_told_that_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_routes, "HEARD_SECONDS", 0.0)
    status, text = posted(tmp_path, Server(SOUND), UNLOAD, {"lora_name": "mill"}, known="d1")
    assert status == 503 and "is unloaded, but this frontend still knows it" in text


def test_what_the_launcher_keeps_is_unloaded_though_it_is_not_served(tmp_path: Path) -> None:
    server = Server(SOUND, kept="/a/one")
    assert posted(tmp_path, server, UNLOAD, {"lora_name": "mill"})[0] == 200
    assert server.asked == [FORGET_ADAPTER, UNLOAD_ADAPTER]
    assert posted(tmp_path / "more", Server(SOUND), UNLOAD, {"lora_name": "mill"})[0] == 404
