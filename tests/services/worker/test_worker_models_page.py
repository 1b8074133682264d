"""The example of docs/models.md is a family that works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import generated, some_prompts, write_model

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.registry import ADAPTERS, is_native

PAGE = (Path(__file__).resolve().parents[3] / "docs/models.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"docs/models.md has no example in {language}"
    return found[1]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as a package that an installer left."""
    entry = re.search(r'^(\w+) = "(\w+):(\w+)"$', block("toml"), re.MULTILINE)
    assert entry
    architecture, module, name = entry.groups()
    (tmp_path / f"{module}.py").write_text(block("python"))
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    group = re.search(r'entry-points\."([\w.]+)"', block("toml"))
    assert group
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{architecture} = {module}:{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.usefixtures("installed")
def test_the_family_of_the_page_chooses_the_tokens_of_transformers(tmp_path: Path) -> None:
    assert len(block("python").splitlines()) < 80
    folder = write_model("arcee", tmp_path / "model")
    info = read_model_info(folder)
    assert info.architecture not in ADAPTERS
    assert is_native(info)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    executor = ModelExecutor(model, EngineSizes(100, 16, 4, 64, 512, info.vocab_size))
    prompts = some_prompts([1, 20, 130])
    assert PlanDriver(executor, 1).run(prompts, 12, chunk=16) == generated("arcee", prompts, 12)


def test_the_page_names_every_architecture_of_our_own() -> None:
    assert {name for name in ADAPTERS if f"`{name}`" not in PAGE} == set()
