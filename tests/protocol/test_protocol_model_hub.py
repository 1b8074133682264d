"""A model named as on the Hugging Face hub: from the local cache, from a hub, and from nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.protocol.hub_server import COMMIT, Hub, running_hub

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.model_hub import is_hub_name
from penstock.protocol.model_info import BadModelFolder, read_model_info

NAME = "org/little-model"
FIND = """
import sys
from penstock.protocol.config import Config, LoadingConfig
from penstock.protocol.model_hub import find_model
from penstock.protocol.model_info import BadModelFolder
config = Config(loading=LoadingConfig(download=sys.argv[1] == "yes"))
for name in sys.argv[2:]:
    try:
        print(find_model(name, config))
    except BadModelFolder as error:
        print("refused:", error)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_model(tmp_path_factory.mktemp("model") / "own")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub() as hub:
        more = {
            "pytorch_model.bin": b"x",
            "original/x.json": b"{}",
            "consolidated.safetensors": b"",
        }
        hub.repositories[NAME] = {**files, **more}
        yield hub


def cached(home: Path, files: dict[str, bytes], name: str = NAME) -> Path:
    """A snapshot in the hub's cache, as the hub's client lays it out."""
    root = home / "hub" / ("models--" + name.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file, data in files.items():
        (snapshot / file).write_bytes(data)
    return snapshot


def find(home: Path, *names: str, download: bool = True, **environment: str) -> tuple[str, float]:
    """What each name becomes, or why it becomes nothing, a line each; seconds."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("HF_", "PENSTOCK_"))}
    kept |= {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", FIND, "yes" if download else "no", *(names or [NAME])],
        capture_output=True, text=True, timeout=60, env=kept, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), time.monotonic() - began


NOBODY = {"HF_ENDPOINT": "http://127.0.0.1:9"}
"""A hub that cannot be reached."""


def test_a_name_is_organisation_slash_model_and_nothing_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    for other in ("/models/x", "./a/b", "a/b/c", "model", "", "a/", "../a/b", "a /b", "~/a"):
        assert not is_hub_name(other), other
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_name("Qwen/Qwen3-0.6B")


def test_a_model_in_the_cache_is_found_without_the_network(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    snapshot = cached(tmp_path, files)
    for download in (True, False):
        assert find(tmp_path, download=download, **NOBODY)[0] == str(snapshot)


def test_an_incomplete_snapshot_is_named_with_what_it_lacks(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    snapshot = cached(tmp_path, files)
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"")
    said, _ = find(tmp_path, download=False)
    assert "without model-2.safetensors;" in said
    assert said.endswith(f"hf download {NAME}")


def test_without_a_network_the_answer_is_quick_and_ends_with_the_command(tmp_path: Path) -> None:
    for environment, words in (
        (NOBODY, "http://127.0.0.1:9 failed"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
    ):
        said, seconds = find(tmp_path, **environment)
        assert said.startswith(f"refused: {NAME}: no such folder, and not in the hub's cache")
        assert words in said
        assert said.endswith(f": hf download {NAME}")
        assert seconds < 30  # one or two on a free machine, most of it Python's start
    said, _ = find(tmp_path, download=False, **NOBODY)
    assert "--no-download" in said
    assert said.endswith(f": hf download {NAME}")


def test_a_model_is_downloaded_without_pickles_and_copies(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    said, _ = find(tmp_path, HF_ENDPOINT=hub.url)
    folder = Path(said)
    assert {path.name for path in folder.iterdir()} == set(files)
    assert all((folder / name).read_bytes() == data for name, data in files.items())
    hub.served.clear()
    assert find(tmp_path, HF_ENDPOINT=hub.url)[0] == said
    assert hub.served == [], "it is there already"


def test_an_interrupted_download_goes_on_where_it_was(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    weights = bytes(24 << 20)  # the hub's client keeps what it has in pieces of 10 MB
    hub.repositories[NAME] = {**files, "model.safetensors": weights}
    hub.broken_after["model.safetensors"] = 15 << 20
    said, _ = find(tmp_path, HF_ENDPOINT=hub.url)
    assert (Path(said) / "model.safetensors").read_bytes() == weights
    begun = [int(one.partition("@")[2]) for one in hub.served if one.startswith("model.safe")]
    assert begun[0] == 0
    assert 0 < begun[-1] <= 15 << 20


def test_what_the_hub_refuses_is_told_with_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    hub.repositories["org/little-GGUF"] = {"little-q4.gguf": b"x", "config.json": b"{}"}
    hub.repositories["org/pickles"] = {"pytorch_model.bin": b"x"}
    names = ("org/none", NAME, "org/little-GGUF", "org/pickles")
    said = find(tmp_path, *names, HF_ENDPOINT=hub.url)[0].splitlines()
    assert "shows no model of that name" in said[0]
    assert said[0].endswith("hf download org/none")
    assert f"accept its terms at {hub.url}/{NAME}" in said[1]
    assert said[1].endswith(f"hf download {NAME}")
    assert "GGUF files, which are not downloaded" in said[2]
    assert said[2].endswith("for instance org/little")
    assert "no safetensors" in said[3]
    assert said[3].endswith("org/pickles pickles")
    assert not hub.served


@pytest.mark.parametrize("what", ["file", "folder"])
def test_gguf_is_named_as_not_supported_with_what_to_use(what: str, tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadModelFolder, match=r"model-q4\.gguf: a GGUF file alone.*safetensors"):
        read_model_info(tmp_path if what == "folder" else tmp_path / "model-q4.gguf")
