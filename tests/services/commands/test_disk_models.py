"""``penstock pull``, ``list`` and ``rm`` on a cache of their own, with a hub on this host."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.commands.command_run import call, environment, run
from support.commands.emulator import terminal
from support.protocol.hub_server import COMMIT, Hub, running_hub

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.process.running_servers import Registration

NAME = "org/little"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_model(tmp_path_factory.mktemp("model") / "own")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.repositories[NAME] = {**files, "pytorch_model.bin": b"x"}
        yield hub


def home(folder: Path, **more: str) -> dict[str, str]:
    """Variables of a cache in a folder, and of no hub that can be reached."""
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_XET": "1"}
    return {**nobody, "HF_HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), **more}


def ask(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, **chosen: str
) -> subprocess.CompletedProcess[str]:
    """Call ``penstock`` in this process. The hub's client has read HF_HOME before it was chosen."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{chosen['HF_HOME']}/hub")
    return call(*arguments, **chosen)


def cached(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """A snapshot as the hub's client lays it out."""
    root = folder / "hub" / ("models--" + name.replace("/", "--"))
    snapshot = root / "snapshots" / COMMIT
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for file, data in files.items():
        (root / "blobs" / file).write_bytes(data)
        (snapshot / file).symlink_to(f"../../blobs/{file}")
    return snapshot


def test_a_model_is_pulled_listed_and_removed(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = home(tmp_path, HF_ENDPOINT=hub.url)
    pulled = run("pull", NAME, **chosen)
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert {path.name for path in folder.iterdir()} == set(files)  # and no pickle
    assert f"downloading {NAME}" in pulled.stderr
    (found,) = json.loads(run("list", "--json", **chosen).stdout)
    assert (found["name"], found["folder"], found["served"]) == (NAME, str(folder), "yes")
    assert found["architecture"] == json.loads(files["config.json"])["architectures"][0]
    assert found["size"] >= sum(map(len, files.values()))
    removed = run("rm", NAME, "--yes", **chosen)
    assert removed.stdout.startswith(f"removed {NAME}: ")
    assert not any(path.is_file() for path in (tmp_path / "hub").rglob("*little*/**/*"))
    assert "no model is in the hub's cache" in ask(monkeypatch, "list", **chosen).stdout


def test_without_a_network_pull_says_what_failed_in_one_line(tmp_path: Path) -> None:
    done = run("pull", NAME, **home(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert "http://127.0.0.1:9 failed" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "HF_HUB_OFFLINE" in run("pull", NAME, **home(tmp_path, HF_HUB_OFFLINE="1")).stderr
    assert "expected a name on the hub" in call("pull", "little", **home(tmp_path)).stderr


def test_list_says_why_a_model_cannot_be_served(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(tmp_path, NAME, files)
    config = json.loads(files["config.json"])
    for name, changed in (
        ("org/foreign", {"architectures": ["MadeUpForCausalLM"]}),
        ("org/encoder", {"architectures": ["BertModel"], "model_type": "bert"}),
        ("org/odd", {"architectures": ["BertModel"], "position_embedding_type": "relative_key"}),
        ("org/picture", {"architectures": ["ViTForImageClassification"]}),
        ("org/evil\x1b[2J", {}),
    ):
        data = json.dumps(config | changed).encode()
        cached(tmp_path, name, {**files, "config.json": data})
    half = {file: data for file, data in files.items() if not file.endswith("safetensors")}
    cached(tmp_path, "org/half", half)
    (tmp_path / "hub" / "models--org--begun" / "blobs").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--org--data").mkdir()
    done = ask(monkeypatch, "list", **home(tmp_path))
    rows = {line.split()[0]: line.split("  ")[-1].strip() for line in done.stdout.splitlines()[1:]}
    assert rows == {
        NAME: "yes",
        "org/foreign": "by transformers",
        "org/encoder": "yes",
        "org/odd": "no: config.json: position_embedding_type is 'relative_key'; supported is "
        "'absolute'",
        "org/picture": "no",
        "org/half": "no: without model.safetensors",
        "org/begun": "no: the download has just begun",
        "org/evil␛[2J": "yes",
    }


def test_a_removal_is_asked_for_and_no_leaves_everything(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    snapshot = cached(tmp_path, NAME, files)
    chosen = environment(**home(tmp_path))
    with terminal("rm", NAME, environment=chosen) as seen:
        seen.sees(f"remove {NAME} (")
        seen.type("n\r")
        assert seen.ended() == 1
    assert snapshot.exists()
    with terminal("rm", NAME, environment=chosen) as seen:
        seen.sees("[y/N]")
        seen.type("y\r")
        assert seen.ended() == 0
    assert not snapshot.exists()


def test_nothing_is_removed_unasked_or_while_it_is_served(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(tmp_path, NAME, files)
    chosen = home(tmp_path)
    assert "say --yes" in ask(monkeypatch, "rm", NAME, **chosen).stderr
    assert (
        "did you mean org/little?" in ask(monkeypatch, "rm", "org/litle", "--yes", **chosen).stderr
    )
    folder = tmp_path / "penstock-serve-x"
    folder.mkdir()
    Registration(folder, "ipc:///x", 3.0, [(NAME, str(snapshot))]).ready("http://h:1")
    done = ask(monkeypatch, "rm", NAME, "--yes", **chosen)
    assert (done.returncode, done.stderr) == (
        1,
        f"penstock: {NAME} is served at http://h:1; stop that first\n",
    )
    own = tmp_path / "own"  # where a server has a folder of its own, that may be all there is
    folder.rename(own)
    named = {**chosen, "PENSTOCK_RUNTIME_DIR": str(own)}
    assert "is served at http://h:1" in ask(monkeypatch, "rm", NAME, "--yes", **named).stderr
    own.rename(folder)
    linked = tmp_path / "elsewhere"
    linked.symlink_to(tmp_path)
    through_a_link = {**chosen, "HF_HOME": str(linked)}
    assert (
        "is served at http://h:1" in ask(monkeypatch, "rm", NAME, "--yes", **through_a_link).stderr
    )
    (linked / "model").symlink_to(snapshot)
    Registration(folder, "ipc:///x", 3.0, [(NAME, str(tmp_path / "model"))]).ready("http://h:1")
    assert "is served at http://h:1" in ask(monkeypatch, "rm", NAME, "--yes", **chosen).stderr
    assert snapshot.exists()
    assert os.listdir(tmp_path / "hub") == ["models--org--little"]
