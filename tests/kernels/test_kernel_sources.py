"""What is true of the kernels' sources: read here, not run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import penstock

FOLDER = Path(penstock.__file__).parent / "kernels" / "gpu"
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}
CONSTANTS = {
    ("decode_attention", "DecodeConstants"): ("decode_attention", "_decode_kernel"),
    ("decode_attention_hopper", "DecodeConstants"): (
        "decode_splits_hopper", "hopper_decode_kernel",
    ),
    ("shared_prefix", "PrefixConstants"): ("shared_prefix", "_prefix_kernel"),
    ("shared_prefix_hopper", "PrefixConstants"): ("shared_prefix_hopper", "_hopper_prefix_kernel"),
    ("prefill_attention", "PrefillConstants"): ("prefill_attention", "_prefill_kernel"),
    ("prefill_attention_hopper", "PrefillConstants"): (
        "prefill_attention_hopper", "_hopper_prefill_kernel",
    ),
    ("rope_cache", "RopeConstants"): ("rope_cache", "_rope_cache_kernel"),
    ("rows_linear_hopper", "RowsConstants"): ("rows_linear_hopper", "_rows_kernel"),
    ("compressed_linear_hopper", "CompressedConstants"): (
        "compressed_linear_hopper", "_compressed_kernel",
    ),
    ("quantized_linear", "QuantizedConstants"): ("quantized_linear", "_quantized_kernel"),
    ("gated_linear_hopper", "GatedConstants"): ("gated_linear_hopper", "_gated_kernel"),
    ("widen_cache", "WidenConstants"): ("widen_cache", "_widen_kernel"),
}  # fmt: skip
"""Structs of a launch's constants, and the kernels that they are for."""


def kernels(module: ast.Module) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


def fields(module: ast.Module, struct: str) -> list[str]:
    body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == struct)
    return [
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


@pytest.mark.parametrize(("struct", "kernel"), CONSTANTS.items(), ids=str)
def test_a_struct_has_the_constants_of_its_kernel_in_their_order(
    struct: tuple[str, str], kernel: tuple[str, str]
) -> None:
    """They are given by position."""
    args = kernels(MODULES[kernel[0]])[kernel[1]].args.args
    names = [arg.arg.lower() for arg in args if arg.annotation is not None]
    assert [arg.arg for arg in args[-len(names) :]] == [name.upper() for name in names]
    assert fields(MODULES[struct[0]], struct[1]) == names


def test_every_struct_of_constants_is_compared() -> None:
    found = {
        (name, node.name)
        for name, module in MODULES.items()
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Constants")
    }
    assert found == CONSTANTS.keys()


@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if kernels(module)])
def test_every_file_with_a_kernel_names_its_reference(name: str) -> None:
    text = ast.get_docstring(MODULES[name]) or ""
    assert re.search(r"[Rr]eference|penstock\.kernels\.|result is that of|results of", text)
