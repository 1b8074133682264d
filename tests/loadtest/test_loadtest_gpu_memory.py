"""The memory that studies read from the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.loadtest.studies.gpu_memory import memory_in_use

DRIVER = """#!/bin/sh
for word in "$@"; do
  case $word in --id=*) cards=$(echo "${word#--id=}" | tr , " ");; esac
done
for card in ${cards:-0 1 2}; do echo "${card}00"; done
"""


@pytest.mark.parametrize(
    ("visible", "found"), [(None, [0, 100, 200]), ("1", [100]), ("2,1", [200, 100])]
)
def test_memory_is_that_of_the_cards_that_the_process_may_use(
    visible: str | None, found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(DRIVER)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory_in_use() == found
