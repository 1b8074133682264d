"""Random adapters for measurements are what a worker reads, each another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.loadtest.models import make_adapters
from penstock.loadtest.models.make_model import main as make_model
from penstock.services.worker.adapters.peft_folder import AdapterFolder, LayerSize


def test_made_adapters_fit_the_model_and_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_model([str(tmp_path / "model")]) == 0
    capsys.readouterr()
    arguments = [str(tmp_path / "model"), str(tmp_path / "made"), "--count", "2", "--rank", "3"]
    assert make_adapters.main(arguments) == 0
    folders = [tmp_path / "made" / name for name in ("a0", "a1")]
    assert capsys.readouterr().out == f"--lora a0={folders[0]} --lora a1={folders[1]}\n"
    sizes = make_adapters.linear_sizes(tmp_path / "model")
    layers = {name: LayerSize(*size) for name, size in sizes.items()}
    read = [AdapterFolder(folder, layers, 3).read() for folder in folders]
    assert read[0].digest != read[1].digest and set(read[0].pairs) == set(sizes)
