"""Requests of the pages are answered, as curl sends them, by a server of the kind that it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.docs_examples import ROOT, Command, commands
from support.pipeline.adapter_folders import write_adapter
from support.pipeline.served import BUILT_IN, SMALL, Served, SharedServers, added_key, served

from penstock.loadtest.models.make_adapters import linear_sizes

OTHERS = {"README.md", "adapters.md", "pooling.md"}
"""The first has a test of its own; the others need an administrator's key, or a model of another
kind."""
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def requests_of(pages: set[str]) -> list[Command]:
    found = {one.words: one for one in commands() if one.words[0] == "curl"}
    return [one for one in found.values() if one.page in pages]


def send(server: Served, command: Command, key: str = "") -> None:
    words = [
        word.replace("http://127.0.0.1:8000", server.url).replace("$ADMIN", key)
        for word in command.words
    ]
    done = subprocess.run(
        [*words, "--fail-with-body", "--silent", "--show-error", "--max-time", "60"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_each_request_of_the_pages_is_answered(shared_server: SharedServers) -> None:
    server = shared_server(*BUILT_IN)
    pages = {one.page for one in commands()} - OTHERS
    found = requests_of(pages)
    assert {"start.md", "structured-outputs.md", "prompt-caching.md"} <= {one.page for one in found}
    for command in found:
        send(server, command)


@pytest.mark.slow
def test_an_administrator_loads_and_unloads_the_adapter_of_the_page(
    small_model: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapters/sql", linear_sizes(small_model), seed=1)
    key = added_key(tmp_path / "keys", "root", "admin")
    flags = ["--lora-dirs", str(tmp_path / "adapters"), "--keys-file", str(tmp_path / "keys")]
    with served(str(small_model), *SMALL, *flags) as server:
        load, unload = requests_of({"adapters.md"})
        send(server, load, key)
        send(server, unload, key)


@pytest.mark.slow
def test_the_documents_of_the_page_are_ranked(tmp_path: Path) -> None:
    folder = tmp_path / "bge-reranker-base"
    shutil.copytree(ROOT / "demo/model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    config["id2label"] = {"0": "relevant"}
    (folder / "config.json").write_text(json.dumps(config))
    with served(str(folder), "--device", "null") as server:
        (rank,) = requests_of({"pooling.md"})
        send(server, rank)
