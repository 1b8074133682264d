"""What must be settled before any test module is imported."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
    """Files of this folder and the simulation first: a long one that comes last keeps one process
    busy alone."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent not in (here, here / "simulation"))


def pytest_collection_finish() -> None:
    """One thread for torch: two in each of two test processes wait for each other, and what takes
    16 seconds alone then takes 90."""
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        _replace_once(interpreter)


def _replace_once(interpreter: ModuleType) -> None:
    """Triton's interpreter looks for the functions of ``triton.language`` that it replaces at each
    launch, and again at each call of a function within a kernel, which takes longer than what they
    compute here. In a test process they are replaced once, and stay so."""
    replace, replaced = interpreter._patch_lang, set[Any]()

    def replace_first(fn: Any) -> Any:
        if fn not in replaced:
            replace(fn)
            replaced.add(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_first
