"""Which adapters a launcher lets in, and what its workers load when they start again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.protocol.config import Config, ConfigError, resolve
from penstock.protocol.config.adapters import unfit_name
from penstock.protocol.config.fields import LoadingConfig
from penstock.protocol.config.process_fields import LaunchConfig
from penstock.protocol.wire.messages.administration import (
    ADMIT_ADAPTER,
    FORGET_ADAPTER,
    KEEP_ADAPTER,
    AdapterAnswer,
    AdapterPlace,
    Ask,
)
from penstock.services.launcher.adapter_set import AdapterSet, require_none
from penstock.services.launcher.processes import Child


class World:
    def __init__(self, folder: Path, most: int) -> None:
        for name in ("one", "two"):
            (folder / name).mkdir()
        self.worker = Child("worker", 0, {})
        config = Config(
            loading=LoadingConfig(max_loras=most), launch=LaunchConfig(lora_dirs=[str(folder)])
        )
        self.adapters = AdapterSet([config], [self.worker])

    def ask(self, what: str, name: str, folder: str = "") -> AdapterAnswer:
        about = msgspec.msgpack.encode(AdapterPlace(name, folder))
        told = self.adapters.answer(Ask("", 1, what, about))
        assert told is not None
        return msgspec.msgpack.decode(told.answer, type=AdapterAnswer)

    @property
    def loads(self) -> list[str]:
        lora = msgspec.json.decode(self.worker.environment["PENSTOCK_LORA"], type=list[str])
        return [one.partition("=")[0] for one in lora]


def test_launcher_lets_in_as_many_names_as_a_worker_may_load_again(tmp_path: Path) -> None:
    """Also of one folder: what a worker counts once is written down twice."""
    world = World(tmp_path, 1)
    assert world.ask(KEEP_ADAPTER, "first", "one").status == 200
    refused = world.ask(ADMIT_ADAPTER, "second", "one")
    assert refused.status == 400 and "as --max-registered-loras" in refused.message
    assert world.ask(KEEP_ADAPTER, "second", "one").status == 400 and world.loads == ["first"]
    assert world.ask(ADMIT_ADAPTER, "first", "two").status == 200  # in the place of the former
    world.ask(FORGET_ADAPTER, "first")
    assert world.ask(KEEP_ADAPTER, "second", "one").status == 200 and world.loads == ["second"]


def test_workers_of_a_server_that_was_ready_start_without_a_folder_that_is_gone() -> None:
    children = [Child(service, 0, {}) for service in ("worker", "scheduler")]
    require_none(children)
    assert [one.environment for one in children] == [{"PENSTOCK_LORA_REQUIRED": "false"}, {}]


def test_a_folder_of_adapters_must_be_there_at_the_start_and_not_later(tmp_path: Path) -> None:
    config = Config(launch=LaunchConfig(lora_dirs=[str(tmp_path / "gone")]))
    with pytest.raises(ConfigError, match=r"--lora-dirs .*gone: there is no such folder"):
        AdapterSet([config], [])
    arguments = {"model": "/m", "lora_dirs": config.launch.lora_dirs}
    assert resolve(("model", "launch"), arguments, {})[0].launch == config.launch


@pytest.mark.parametrize("name", ["", "a=b", "a\n", "x" * 257])
def test_a_name_that_cannot_be_written_down_is_refused(name: str) -> None:
    assert unfit_name(name)
