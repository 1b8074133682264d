"""The examples of docs/extending.md do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PAGE = (Path(__file__).resolve().parent.parent / "docs/extending.md").read_text()
SAMPLER, KERNEL, FORMAT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CHECK_OF_KERNEL = """
x, factor = torch.randn(5, 48), torch.randn(5)
assert torch.equal(scale_rows(x, factor), scale_rows_reference(x, factor))
"""


def names_of(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(example, names)
    return names


def test_the_sampler_in_torch_is_its_reference() -> None:
    names = names_of(SAMPLER)
    rows = np.random.default_rng(0).normal(size=(20, 100))
    for row in rows:
        found = names["apply"](torch.from_numpy(row.copy()), 1.5).numpy()
        assert np.array_equal(found, names["reference"](row, 1.5))
        assert 0 < np.isfinite(found).sum() < 100


def test_the_format_gives_the_weight_that_its_tensors_hold() -> None:
    layout = names_of(FORMAT)["RowInt8Format"]()
    stored = layout.tensors(32, 64)
    assert {name: one.shapes[0] for name, one in stored.items()} == {
        ".codes": (32, 64),
        ".row_scale": (32,),
    }
    codes = torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    scale = torch.rand(32)
    weight = layout.weight({".codes": codes, ".row_scale": scale}, 32, 64)
    assert torch.equal(weight.dequantized(), codes.float() * scale[:, None])
    assert layout.form(32, 64).num_bytes(32, 64) == weight.num_bytes


@pytest.mark.slow  # Triton in a process of its own, with its interpreter
def test_the_kernel_gives_what_its_reference_does(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = tmp_path / "kernel.py"
    program.write_text(KERNEL + CHECK_OF_KERNEL)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
