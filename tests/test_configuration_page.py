"""The files that docs/configuration.md shows can be loaded, and mean the same."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.protocol.config import Config, resolve
from penstock.services.cli import COMMANDS

PAGE = (Path(__file__).resolve().parent.parent / "docs/configuration.md").read_text()
BLOCK = re.compile(r"```(toml|yaml)\n(.*?)```", re.DOTALL)


def test_the_sample_files_are_read_and_mean_the_same(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    keys.chmod(0o600)
    found: list[Config] = []
    for kind, text in BLOCK.findall(PAGE):
        path = tmp_path / f"penstock.{kind}"
        path.write_text(text.replace("/etc/penstock/keys", str(keys)))
        found.append(resolve(COMMANDS["serve"].groups, {"config": str(path)}, {})[0])
    toml, yaml = found
    assert toml == yaml
    assert toml.model.served_model_name == ["qwen", "default"]
    assert toml.model.max_model_len == 32_000
    assert toml.scheduler.scheduling_policy == "fair"
