"""The examples of docs/library.md run as they stand, and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/library.md").read_text()
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_the_examples_print_what_the_page_says() -> None:
    blocks = BLOCK.findall(PAGE)
    program = "\n".join(text for kind, text in blocks if kind == "python")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(text for kind, text in blocks if kind == "text")


def test_every_public_name_is_listed_by_dir_and_can_be_imported() -> None:
    assert set(penstock.__all__) <= set(dir(penstock))
    assert "__version__" in dir(penstock)
    for name in penstock.__all__:
        assert getattr(penstock, name).__name__ == name
    assert penstock.LLM.__module__ in {"penstock.services.library.llm"}


def test_dir_imports_nothing_heavy() -> None:
    code = "import penstock, sys; print(*dir(penstock)); print({'torch', 'zmq'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines()[1] == "set()"
    assert "SamplingParams" in done.stdout
