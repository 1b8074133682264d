"""Which adapters workers get that are started later, as loads succeed and fail."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.config.process_fields import LaunchConfig
from penstock.protocol.wire.messages.administration import (
    ADMIT_ADAPTER,
    FORGET_ADAPTER,
    KEEP_ADAPTER,
    AdapterAnswer,
    AdapterPlace,
    Ask,
)
from penstock.services.launcher.adapter_set import AdapterSet
from penstock.services.launcher.processes import Child


class World:
    def __init__(self, dirs: Path) -> None:
        self.worker = Child("worker", 0, {})
        launch = LaunchConfig(lora_dirs=[str(dirs)])
        config = Config(launch=launch, model=ModelConfig(served_model_name=["org/base"]))
        self.adapters = AdapterSet([config], [self.worker])
        self.dirs = dirs

    def ask(self, what: str, name: str, folder: str = "", load: str = "") -> AdapterAnswer:
        path = str(self.dirs / folder) if folder else ""
        about = msgspec.msgpack.encode(AdapterPlace(name, path, load))
        told = self.adapters.answer(Ask("ipc:///f", 7, what, about))
        assert told is not None
        return msgspec.msgpack.decode(told.answer, type=AdapterAnswer)

    @property
    def kept(self) -> list[str]:
        found = json.loads(self.worker._environment["PENSTOCK_LORA"])
        return [one.replace(f"{self.dirs}/", "") for one in found]


@pytest.fixture
def world(tmp_path: Path) -> World:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return World(tmp_path)


def test_a_load_that_fails_leaves_what_was_there_before(world: World) -> None:
    assert world.ask(KEEP_ADAPTER, "mill", "one", "load-1").folder == ""
    assert world.kept == ["mill=one"]
    assert world.ask(KEEP_ADAPTER, "mill", "two", "load-2").folder == str(world.dirs / "one")
    assert world.kept == ["mill=two"]
    world.ask(FORGET_ADAPTER, "mill", load="load-2")
    assert world.kept == ["mill=one"]
    world.ask(KEEP_ADAPTER, "new", "two", "load-3")
    world.ask(FORGET_ADAPTER, "new", load="load-3")
    assert world.kept == ["mill=one"]


def test_an_unload_tells_whether_there_was_such_an_adapter(world: World) -> None:
    world.ask(KEEP_ADAPTER, "mill", "one", "load-1")
    assert world.ask(FORGET_ADAPTER, "mill").folder == str(world.dirs / "one")
    assert world.ask(FORGET_ADAPTER, "mill").folder == ""
    assert world.kept == []


@pytest.mark.parametrize("name", ["base", "org/base"])
def test_an_adapter_does_not_get_a_name_of_the_model(world: World, name: str) -> None:
    assert world.ask(ADMIT_ADAPTER, name, "one").code == "model_exists"
