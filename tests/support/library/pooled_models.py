"""Model folders whose models answer with numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import penstock

DEMO = Path(penstock.__file__).resolve().parents[1] / "demo/model"


def write_classifier(folder: Path, labels: list[str]) -> str:
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    config["id2label"] = {str(number): label for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
