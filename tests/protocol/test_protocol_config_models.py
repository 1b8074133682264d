"""Several models in one configuration: how they are given, shown and told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.config import Config, ConfigError, build_parser, resolve
from penstock.protocol.config.complete import AnotherModel, complete, with_another_model
from penstock.protocol.config.keep_alive import keep_alive_of
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.models import check_names, of_each, together, written
from penstock.protocol.config.shown import show
from penstock.protocol.config.sleep_checks import check_sleep

GROUPS = ["model", "cache", "device", "launch", "cluster", "server"]


def parse(*arguments: str) -> Any:
    parser = build_parser("penstock", "test", GROUPS, positional_model=True, several_models=True)
    return parser.parse_args(list(arguments))


def models(arguments: Any, environment: dict[str, str] | None = None) -> tuple[str, list[str]]:
    config, _ = resolve(GROUPS, arguments, environment or {}, several=True)
    return config.model.model, config.model.models


@pytest.mark.parametrize(
    "arguments",
    [
        ["/m/a", "/m/b"],
        ["/m/a", "--port", "1", "/m/b"],
        ["--port", "1", "/m/a", "/m/b"],
        ["--model", "/m/a", "--model", "/m/b"],
    ],
)
def test_flags_name_several_models(arguments: list[str]) -> None:
    assert models(parse(*arguments)) == ("", ["/m/a", "/m/b"])


@pytest.mark.parametrize("arguments", [["/m/a"], ["--port", "1", "/m/a"], ["--model", "/m/a"]])
def test_flags_name_one_model(arguments: list[str]) -> None:
    assert models(parse(*arguments)) == ("/m/a", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/m/a", ("/m/a", [])),
        ("/m/a,org/b", ("", ["/m/a", "org/b"])),
        ('["/m/a,1", "/m/b"]', ("", ["/m/a,1", "/m/b"])),
        ('["/m/a,1"]', ("/m/a,1", [])),
    ],
)
def test_the_environment_names_models(text: str, expected: tuple[str, list[str]]) -> None:
    assert models(parse(), {"PENSTOCK_MODEL": text}) == expected


@pytest.mark.parametrize("folder", ["/m/a", "/m/a,b", "[odd]", "/m/with space"])
def test_a_child_reads_the_folder_that_the_launcher_wrote(folder: str) -> None:
    config, _ = resolve(GROUPS, {}, {"PENSTOCK_MODEL": written(folder)})
    assert config.model.model == folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [('model = "/m/a,1"', ("/m/a,1", [])), ('model = ["/m/a", "/m/b"]', ("", ["/m/a", "/m/b"]))],
)
def test_a_file_names_models(text: str, expected: tuple[str, list[str]], tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    assert models({"config": str(path)}) == expected
    assert models({"config": str(path), "MODEL": ["/m/c"]}) == ("/m/c", []), "flags win"


def test_what_has_one_model_refuses_several_by_name() -> None:
    with pytest.raises(ConfigError, match=r"PENSTOCK_MODEL names 2 models \(a, b\).*takes one"):
        resolve(GROUPS, {}, {"PENSTOCK_MODEL": "a,b"})


def several(**settings: Any) -> list[Config]:
    given = {"model": ["/m/a", "/m/b"], "device": "cpu", **settings}
    config, sources = resolve(GROUPS, given, {}, several=True)
    return [one for one, _ in of_each(config, sources)]


def test_each_model_has_a_configuration_with_its_own_name_and_share() -> None:
    one, two = several(served_model_name=["x", "y"], memory_share=["0.7", "0.3"])
    assert (one.model.model, one.model.names(), one.cache.share()) == ("/m/a", ["x"], 0.7)
    assert (two.model.model, two.model.names(), two.cache.share()) == ("/m/b", ["y"], 0.3)
    one, two = several()
    assert (one.model.names(), one.cache.share()) == (["a"], 0.5)
    assert [config.cache.share() for config in several(num_kv_blocks="64")] == [1.0, 1.0]


def test_models_of_which_some_are_awake_share_the_memory_of_those() -> None:
    three = ["/m/a", "/m/b", "/m/c"]
    found = several(model=three, resident="2")
    assert [config.cache.share() for config in found] == [0.5, 0.5, 0.5]
    found = several(model=three, resident="2", memory_share=["0.25", "0.75", "0.25"])
    assert [config.cache.share() for config in found] == [0.25, 0.75, 0.25]
    with pytest.raises(ConfigError, match=r"together 1.1, but 2 of the models share one memory"):
        several(model=three, resident="2", memory_share=["0.2", "0.5", "0.6"])
    check_sleep("serve", found)
    with pytest.raises(ConfigError, match="--resident 1 chooses among several models"):
        check_sleep("serve", several(model=["/m/a"], resident="1"))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"sleep_level": "1"}, "--sleep-level 1 needs --resident or --keep-alive"),
        ({"prepare_engines": True}, "--prepare-engines needs .* --hold-weights"),
    ],
    ids=str,
)
def test_how_models_sleep_is_for_servers_whose_models_do(
    settings: dict[str, Any], name: str
) -> None:
    found = several(model=["/m/a"], **settings)
    with pytest.raises(ConfigError, match=name):
        check_sleep("serve", found)
    check_sleep("worker", found)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("1d", 86400.0), ("7", 7.0), ("0", 0.0),
     ("250ms", 0.25), ("-1", None)],
)  # fmt: skip
def test_a_keep_alive_is_written_as_people_do(text: str, seconds: float | None) -> None:
    assert keep_alive_of(["a", "b"], [text]) == {"a": seconds, "b": seconds}


def test_each_model_may_have_a_keep_alive_of_its_own() -> None:
    assert keep_alive_of(["a", "b"], ["1m", "-1"]) == {"a": 60.0, "b": None}
    assert keep_alive_of(["a", "b"], []) == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"served_model_name": ["x"]}, r"--served-model-name x: 1 name for 2 models"),
        ({"served_model_name": ["x", "y", "z"]}, r"x y z: 3 names for 2 models \(/m/a, /m/b\)"),
        ({"memory_share": ["0.5"]}, r"--memory-share 0.5: 1 share for 2 models"),
        ({"memory_share": ["0.7", "0.5"]}, r"--memory-share 0.7 0.5: together 1.2"),
        ({"memory_share": ["0", "0.5"]}, r"--memory-share"),
        ({"memory_share": ["0.5", "0.5"], "num_kv_blocks": "64"}, "--num-kv-blocks 64 both"),
        ({"memory_share": ["0.5", "0.5"], "device": "null"}, "--device null"),
        ({"resident": "3"}, r"--resident 3 is more than the 2 models"),
        ({"keep_alive": ["1m", "2m", "3m"]}, r"--keep-alive 1m 2m 3m: 3 times for 2 models"),
        ({"resident": "1", "memory_share": ["1.0", "0"]}, r"--memory-share"),
        ({"port_range": "20000-20005"}, "fewer ports than the 9 processes"),
    ],
)
def test_what_does_not_fit_several_models_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        several(**settings)


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the name 'a': /m/a and /n/a; .*--served-model-name"):
        check_names(several(model=["/m/a", "/n/a"]))


def test_what_is_shown_is_read_back_to_the_same(tmp_path: Path) -> None:
    given = {"model": ["/m/a", "/m/b"], "memory_share": ["0.75", "0.25"], "device": "cpu"}
    config, sources = resolve(GROUPS, given, {}, several=True)
    found = of_each(config, sources)
    path = tmp_path / "shown.toml"
    path.write_text(show(*together(config, sources, found), GROUPS))
    assert 'model = ["/m/a", "/m/b"]' in path.read_text()
    again, its_sources = resolve(GROUPS, {"config": str(path)}, {}, several=True)
    assert [one.cache for one, _ in of_each(again, its_sources)] == [one.cache for one, _ in found]
    assert again.model.models == ["/m/a", "/m/b"]


ONE_GPU = Machine(cores=8, physical_cores=4, gpus=1)
THREE_GPUS = Machine(cores=8, physical_cores=4, gpus=3)


def another(
    folder: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    count: int = 1,
    share: float = 0.0,
) -> Config:
    """The last of ``count`` models that join one which a server was started with."""
    monkeypatch.setattr("penstock.protocol.config.complete.this_machine", lambda: machine)
    resolved = resolve(GROUPS, {"model": str(folder), **settings}, {})
    running = [complete(*resolved, machine, may_lack_model=False)[0]]
    for number in range(count):
        more = AnotherModel(str(folder), f"more-{number}", share)
        running.append(with_another_model(*resolved, more, running))
    return running[-1]


@pytest.mark.parametrize(
    ("machine", "settings", "share", "expected"),
    [
        (THREE_GPUS, {}, 0.0, (1, [])),
        (THREE_GPUS, {"data_parallel_size": "2"}, 0.5, None),
        (THREE_GPUS, {"memory_share": ["0.5"]}, 0.5, (0, [0.5])),
        (ONE_GPU, {}, 0.0, None),
        (ONE_GPU, {"memory_share": ["0.75"]}, 0.0, (0, [0.25])),
        (ONE_GPU, {"memory_share": ["0.75"]}, 0.2, (0, [0.2])),
        (ONE_GPU, {"memory_share": ["0.75"]}, 0.3, None),
        (ONE_GPU, {"num_kv_blocks": "100"}, 0.0, (0, [])),
    ],
)  # fmt: skip
def test_a_model_that_joins_gets_free_devices_or_what_is_left_of_the_memory(
    machine: Machine,
    settings: dict[str, Any],
    share: float,
    expected: tuple[int, list[float]] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_model(tmp_path / "m")
    if expected is None:
        with pytest.raises(ConfigError, match="of the memory of a device"):
            another(folder, machine, monkeypatch, settings, share=share)
        return
    found = another(folder, machine, monkeypatch, settings, share=share)
    assert (found.device.device_index, found.cache.memory_share) == expected


def test_models_that_join_take_one_device_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "m")
    assert another(folder, THREE_GPUS, monkeypatch, {}, count=2).device.device_index == 2
    with pytest.raises(ConfigError, match="unload one"):
        another(folder, THREE_GPUS, monkeypatch, {}, count=3)


def test_a_model_that_joins_has_the_settings_of_the_server_and_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "m")
    laptop = Machine(cores=8, physical_cores=4, gpus=0)
    settings = {"served_model_name": ["x", "y"], "max_model_len": "64", "memory_share": ["0.5"]}
    found = another(folder, laptop, monkeypatch, settings)
    assert found.model.names() == ["more-0"]
    assert found.model.max_model_len == 64
    assert found.cache.memory_share == [], "on a CPU it takes its part of what is free"
    resolved = resolve(GROUPS, {"model": str(folder), **settings}, {})
    unnamed = with_another_model(*resolved, AnotherModel(str(folder)), [])
    assert unnamed.model.names() == ["m"]


def test_a_model_that_joins_has_no_adapters_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "m")
    laptop = Machine(cores=8, physical_cores=4, gpus=0)
    found = another(folder, laptop, monkeypatch, {"lora": ["sql=/adapters/sql"]})
    assert found.loading.lora == []
