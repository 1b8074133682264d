"""What must be settled before any test module is imported."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported,
    # which torch and transformers may do at any moment, and whenever a kernel is declared.
    os.environ["TRITON_INTERPRET"] = "1"

# jsonschema would make a parser of IRIs, which takes each test process seconds. No schema of
# the tests names that format.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# What is imported and collected stays. A collection of garbage that looks through all of it takes a
# good part of a second, and a test that makes many objects has many of them.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of this folder first: a long one that comes last keeps one process busy alone."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_collection_finish() -> None:
    """One thread for torch: two in each of two test processes wait for each other, and what takes
    16 seconds alone then takes 90."""
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
