"""The launcher's parts, each alone."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

import penstock
from penstock.protocol.config import Config, resolve
from penstock.protocol.config.fields import DeviceConfig
from penstock.protocol.config.models import of_each
from penstock.protocol.config.process_fields import ClusterConfig, LaunchConfig
from penstock.protocol.config.terminal import Style
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.process import logs
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import Phase
from penstock.protocol.wire.security import SecurityError
from penstock.services.cli import COMMANDS
from penstock.services.launcher.builtin_model import builtin_model
from penstock.services.launcher.children import make_children
from penstock.services.launcher.environment import child_environment
from penstock.services.launcher.listening import check_router_is_free, listen, url
from penstock.services.launcher.processes import describe, exit_code
from penstock.services.launcher.progress import (
    AnnouncedModel,
    Announcement,
    StartupLines,
    block,
    curl,
    has_chat_template,
    json_line,
)
from penstock.services.launcher.runtime_folder import (
    default_router,
    make_default_folder,
    server_folder,
)
from penstock.services.launcher.stderr_relay import StderrRelay


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An environment whose runtime folder is empty and private."""
    tmp_path.chmod(0o700)
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


# --- settings for the children


def test_launcher_children_resolve_the_same_configuration() -> None:
    flags = {
        "model": "/models/a b",
        "served_model_name": ["x", "y"],
        "enable_prefix_caching": False,
        "block_size": "32",
        "max_model_len": "128",
        "device": "null",
        "null_step_ms": "0.25",
        "api_key": ["one,and,commas", "two"],
    }
    groups = COMMANDS["serve"].groups
    config, _ = resolve(groups, flags, {})
    environment = child_environment(config, {})
    assert resolve(groups, {}, environment)[0] == config
    assert set(environment) == {f"PENSTOCK_{name.upper()}" for name in flags}


def test_launcher_children_inherit_everything_but_settings() -> None:
    inherited = {"HOME": "/root", "PENSTOCK_PORT": "9", "PENSTOCK_CONFIG": "/etc/p.toml"}
    assert child_environment(Config(), inherited) == {"HOME": "/root"}


def test_launcher_names_a_port_that_is_in_use() -> None:
    with listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(AddressError, match=rf"127\.0\.0\.1:{port}.*--port"):
            listen("127.0.0.1", port)


def test_launcher_names_a_host_that_is_not_there() -> None:
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_launcher_lets_a_frontend_that_asks_for_sharing_join_its_port() -> None:
    with listen("127.0.0.1", 0) as held, socket.socket() as second, socket.socket() as third:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        second.bind(held.getsockname())
        second.listen()
        with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            third.bind(held.getsockname())


def test_launcher_shows_an_address_that_can_be_reached() -> None:
    with listen("0.0.0.0", 0) as held:
        assert url(held) == f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_launcher_refuses_the_address_of_another_servers_router(kind: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    bind = f"ipc://{tmp_path}/router.sock" if kind == "ipc" else "tcp://127.0.0.1"
    router = Mailbox(bind)
    try:
        with pytest.raises(AddressError, match="in use"):
            check_router_is_free(router.address)
    finally:
        router.close()
    check_router_is_free(router.address)


# --- devices


@pytest.mark.parametrize(
    ("device", "first", "indices"),
    [("cuda", 0, ["0", "1", "2"]), ("cuda", 4, ["4", "5", "6"]), ("cpu", 0, [None] * 3)],
)
def test_launcher_gives_each_engine_a_cuda_device_of_its_own(
    device: Literal["cuda", "cpu"], first: int, indices: list[str | None]
) -> None:
    config = Config(
        device=DeviceConfig(device=device, device_index=first),
        launch=LaunchConfig(data_parallel_size=3),
    )
    children = make_children([config], None, {}).all
    workers = [child for child in children if child.service == "worker"]
    found = [worker._environment.get("PENSTOCK_DEVICE_INDEX") for worker in workers]
    assert found == indices


def test_launcher_gives_each_rank_of_an_engine_a_device_of_its_own() -> None:
    config = Config(
        device=DeviceConfig(device="cuda", device_index=1),
        cluster=ClusterConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
        launch=LaunchConfig(data_parallel_size=2),
    )
    children = make_children([config], None, {}).all
    workers = [child._environment for child in children if child.service == "worker"]
    found = [
        (one["PENSTOCK_ENGINE"], one["PENSTOCK_RANK"], one["PENSTOCK_DEVICE_INDEX"])
        for one in workers
    ]
    ranks = [(engine, rank) for engine in range(2) for rank in range(4)]
    assert found == [(str(e), str(r), str(1 + 4 * e + r)) for e, r in ranks]


def children_of(devices: int, **settings: Any) -> list[Any]:
    given = {"model": ["/m/a", "/m/b"], "device": "cuda", "data_parallel_size": "2", **settings}
    config, sources = resolve(COMMANDS["serve"].groups, given, {}, several=True)
    configs = [one for one, _ in of_each(config, sources, devices=devices)]
    with listen("127.0.0.1", 0) as listener:
        return make_children(configs, listener, {}).all


def test_launcher_starts_a_tokenizer_and_engines_of_each_model_numbered_through() -> None:
    labels = [child.label for child in children_of(2)]
    assert labels == [
        "router",
        *("worker 0 a", "scheduler 0 a", "worker 1 a", "scheduler 1 a"),
        *("worker 2 b", "scheduler 2 b", "worker 3 b", "scheduler 3 b"),
        *("tokenizer 0 a", "tokenizer 1 b", "frontend 0"),
    ]
    for child in children_of(2):
        environment = child._environment
        if " " in child.label[-2:] and child.service != "frontend":
            assert environment["PENSTOCK_MODEL"] == f"/m/{child.label[-1]}"
        if child.service == "scheduler":
            assert environment["PENSTOCK_ENGINE"] == child.label.split()[1]
        if child.service == "frontend":
            assert environment["PENSTOCK_EXPECTED_MODELS"] == '["a", "b"]'


def test_the_first_engines_of_each_model_compute_prompts_and_the_others_go_on_with_them() -> None:
    given = {"prefill_engines": "1", "decode_engines": "2", "data_parallel_size": "3"}
    children = children_of(0, device="cpu", kv_tier_memory_bytes=str(2**30), **given)
    roles = [
        child._environment["PENSTOCK_ROLE"] for child in children if child.service == "scheduler"
    ]
    assert roles == 2 * ["prefill", "decode", "decode"]
    plain = [child for child in children_of(2) if child.service == "scheduler"]
    assert all("PENSTOCK_ROLE" not in child._environment for child in plain)


def test_a_keeper_knows_how_many_models_take_turns() -> None:
    (keeper,) = [
        child
        for child in children_of(2, kv_tier_memory_bytes=str(2**30))
        if child.service == "keeper"
    ]
    assert keeper._environment["PENSTOCK_EXPECTED_MODELS"] == '["a", "b"]'


@pytest.mark.parametrize(
    ("devices", "settings", "indices", "shares"),
    [
        (2, {}, ["0", "1", "0", "1"], ["0.5"] * 4),
        (3, {}, ["0", "1", "0", "1"], ["0.5"] * 4),
        (4, {}, ["0", "1", "2", "3"], [None] * 4),
        (5, {"device_index": "1"}, ["1", "2", "3", "4"], [None] * 4),
        (8, {"tensor_parallel_size": "2"}, list("01234567"), [None] * 8),
        (4, {"tensor_parallel_size": "2"}, list("01230123"), ["0.5"] * 8),
        (4, {"memory_share": ["0.7", "0.3"]}, ["0", "1"] * 2, ["0.7", "0.7", "0.3", "0.3"]),
    ],
)
def test_launcher_lets_models_share_devices_where_there_are_not_enough(
    devices: int, settings: dict[str, Any], indices: list[str], shares: list[str | None]
) -> None:
    workers = [one for one in children_of(devices, **settings) if one.service == "worker"]
    found = [worker._environment for worker in workers]
    assert [environment["PENSTOCK_DEVICE_INDEX"] for environment in found] == indices
    assert [environment.get("PENSTOCK_MEMORY_SHARE") for environment in found] == shares


# --- folders


def test_launcher_gives_each_server_a_private_folder_and_removes_it(place: dict[str, str]) -> None:
    with server_folder(place) as one, server_folder(place) as two:
        assert one != two
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        (one / "left.sock").touch()
    assert os.listdir(place["XDG_RUNTIME_DIR"]) == []


def test_launcher_removes_what_a_killed_launcher_left_and_nothing_else(
    place: dict[str, str],
) -> None:
    root = Path(place["XDG_RUNTIME_DIR"])
    code = (
        "import os, sys\n"
        "from penstock.services.launcher.runtime_folder import server_folder\n"
        "with server_folder(os.environ) as folder:\n"
        "    print(folder, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **place}, capture_output=True, text=True
    )
    left = Path(done.stdout.strip())
    assert left.is_dir()
    (root / "penstock-serve-foreign").mkdir()
    with server_folder(place) as mine, server_folder(place) as other:
        assert set(root.iterdir()) == {mine, other, root / "penstock-serve-foreign"}


def test_launcher_keeps_a_folder_that_the_user_named(tmp_path: Path) -> None:
    with server_folder({}, str(tmp_path / "mine")) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.is_dir()


def test_launcher_removes_the_sockets_of_killed_processes_from_a_named_folder(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys\n"
        "from penstock.protocol.wire.mailbox import Mailbox\n"
        "print(Mailbox('ipc://' + sys.argv[1]).address, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with server_folder({}, str(tmp_path / "mine")) as folder:
        subprocess.run([sys.executable, "-c", code, str(folder)], stdout=subprocess.DEVNULL)
        living = Mailbox(f"ipc://{folder}")
        assert len(os.listdir(folder)) == 4
    assert len(os.listdir(folder)) == 2
    living.close()
    assert os.listdir(folder) == []


def test_launcher_refuses_a_default_folder_whose_parent_others_may_change(
    place: dict[str, str],
) -> None:
    router = default_router(place)
    parent = Path(router.removeprefix("ipc://")).parent.parent
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(SecurityError, match=str(parent)):
        make_default_folder(router)
    parent.chmod(0o700)
    make_default_folder(router)


def test_launcher_falls_back_to_the_temporary_folder(tmp_path: Path) -> None:
    assert default_router({"XDG_RUNTIME_DIR": str(tmp_path / "none")}).startswith("ipc:///")
    assert "none" not in default_router({"XDG_RUNTIME_DIR": str(tmp_path / "none")})


# --- the built-in model


def test_launcher_the_built_in_model_ships_with_penstock() -> None:
    folder = builtin_model()
    info = read_model_info(folder)
    assert info.architecture == "Qwen3ForCausalLM"
    assert has_chat_template(folder)


def test_launcher_says_what_to_do_when_the_built_in_model_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock, "__path__", [str(tmp_path)])
    with pytest.raises(BadModelFolder, match="name a MODEL"):
        builtin_model()


# --- what the user reads


def test_launcher_says_each_phase_once_and_repeats_no_percentages(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = StartupLines(logs.set_up("launcher", "info", "console"))
    for phase, note in [
        (Phase.STARTING, ""),
        (Phase.LOADING, "reading weights 10 %"),
        (Phase.LOADING, "reading weights 11 %"),
        (Phase.LOADING, "taking memory"),
        (Phase.READY, ""),
        (Phase.READY, ""),
    ]:
        lines.phase("worker 0", phase, note)
    logs.flush()
    said = [line.split("  ", 3)[2:] for line in capfd.readouterr().err.splitlines()]
    assert [[process.strip(), text.strip()] for process, text in said] == [
        ["worker 0", "reading weights 10 %"],
        ["worker 0", "taking memory"],
        ["worker 0", "ready"],
    ]


def announced(model: str, chat: bool = False) -> AnnouncedModel:
    return AnnouncedModel(
        model=model,
        folder="/m",
        dtype="float32",
        stored_dtype="bfloat16",
        max_model_len=2048,
        kv_tokens=4096,
        chat=chat,
    )


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_launcher_announces_every_model(names: list[str]) -> None:
    server = Announcement(
        url="http://127.0.0.1:8000",
        models=[announced(name) for name in names],
        device="cpu",
        router="ipc:///r",
        seconds=1.0,
        drain_timeout_s=30.0,
        keys=False,
    )
    shown = re.findall(r"^  (Model|Device) +(\S+)", block(server, Style()), re.MULTILINE)
    assert sorted(shown) == [("Device", "cpu"), *(("Model", name) for name in names)]
    said = "Type     float32  (config.json says bfloat16; see --dtype)"
    assert block(server, Style()).count(said) == len(names)
    told = msgspec.json.decode(json_line(server))
    models = told["models"] if len(names) > 1 else [told]
    assert [(one["model"], one["kv_tokens"]) for one in models] == [(n, 4096) for n in names]
    colours = re.compile(r"\x1b\[\d*m")
    for style in (
        Style(),
        Style(cursor=True),
        Style(colour=True),
    ):  # of a file, with NO_COLOR, else
        assert bool(colours.search(block(server, style))) is style.colour
        assert colours.sub("", block(server, style)) == block(server, Style())


@pytest.mark.parametrize("chat", [True, False])
def test_launcher_prints_a_curl_line_that_a_shell_reads_back(chat: bool) -> None:
    server = Announcement(
        url="http://127.0.0.1:8000",
        models=[announced("it's a model", chat)],
        device="cpu",
        router="ipc:///r",
        seconds=1.0,
        drain_timeout_s=30.0,
        keys=True,
    )
    line = curl(server)
    assert line in block(server, Style())
    words = shlex.split(line)
    assert words[1].startswith("http://127.0.0.1:8000/v1/")
    assert words[1].endswith("chat/completions") == chat
    assert "Authorization: Bearer $PENSTOCK_API_KEY" in words
    body = msgspec.json.decode(words[-1])
    assert body["model"] == "it's a model"
    assert ("messages" in body) == chat


def test_launcher_says_how_a_unix_socket_is_asked() -> None:
    server = Announcement(
        url="unix:/run/a b.sock",
        models=[announced("a")],
        device="cpu",
        router="ipc:///r",
        seconds=1.0,
        drain_timeout_s=30.0,
        keys=False,
    )
    words = shlex.split(curl(server))
    assert words[:3] == ["curl", "--unix-socket", "/run/a b.sock"]
    assert words[3].startswith("http://localhost/v1/")
    assert "Page" not in block(server, Style()) and server.url in block(server, Style())
    told = msgspec.json.decode(json_line(server))
    assert told["url"] == told["api"] == server.url


def test_launcher_describes_how_a_process_ended() -> None:
    assert describe(3) == "ended with exit code 3"
    assert describe(-signal.SIGKILL) == "was killed by SIGKILL"
    assert [exit_code(status) for status in (3, -9, 0)] == [3, 137, 1]


@pytest.mark.parametrize(
    ("written", "last"),
    [
        (b"penstock: this is not the end\nnoise\n", "noise"),
        (b'{"event": "fenced", "level": "error"}\n\n', "fenced"),
        (b"no newline at the end", "no newline at the end"),
        (b"", ""),
    ],
)
def test_launcher_passes_on_what_a_child_writes_and_remembers_its_last_words(
    written: bytes, last: str, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    relay = StderrRelay("worker 0", read)
    relay.start()
    os.write(write, written)
    os.close(write)
    assert relay.last_words() == last
    assert capfd.readouterr().err.rstrip("\n") == written.decode().rstrip("\n")


def test_launcher_leaves_what_a_child_says_at_its_end_for_itself_to_say(
    capfd: pytest.CaptureFixture[str],
) -> None:
    read, write = os.pipe()
    relay = StderrRelay("worker 0", read)
    relay.start()
    os.write(write, b"noise\npenstock: model.safetensors: trunc")
    os.write(write, b"ated\npenstock: second line\n")
    os.close(write)
    assert relay.farewell() == relay.last_words() == "model.safetensors: truncated\nsecond line"
    assert capfd.readouterr().err == "noise\n"
