"""Kernels are found again in Triton's cache, whichever of them was compiled first and where."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys

import pytest

MODULES = (
    "rows_linear_hopper", "compressed_linear_hopper", "compressed_weights", "gated_linear_hopper",
    "decode_plan", "decode_splits_hopper", "shared_prefix_hopper", "prefill_attention_hopper",
    "draw", "adjust_logits", "keep_floor", "token_history", "logprobs", "norm", "rope_cache",
    "slots", "activation", "decode_attention", "prefill_attention", "shared_prefix",
    "few_rows_linear", "skinny_linear", "softcap",
)  # fmt: skip


def keys_in_order(stable: str, modules: tuple[str, ...]) -> dict[str, str]:
    """What Triton finds each kernel of the modules by, hashed in their order. stable: "at once",
    "late" (behind the first module), or "never"."""
    from triton.runtime.jit import JITFunction

    from penstock.kernels.gpu.cache_keys import make_keys_stable

    keys = {}
    for number, name in enumerate(modules):
        if stable != "never" and number >= (stable == "late"):
            assert make_keys_stable()
        module = importlib.import_module(f"penstock.kernels.gpu.{name}")
        for attribute, kernel in vars(module).items():
            if isinstance(kernel, JITFunction) and attribute.endswith("kernel"):
                keys[f"{name}.{attribute}"] = kernel.cache_key
    return keys


Order = tuple[str, tuple[str, ...]]
"""The arguments of ``keys_in_order``."""


def keys_of_a_process(*orders: Order) -> list[dict[str, str]]:
    """What ``keys_in_order`` finds in forks of one process that has loaded Triton."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(orders)],
        capture_output=True, check=True, timeout=100, env=environment,
    )  # fmt: skip
    keys: list[dict[str, str]] = json.loads(done.stdout)
    return keys


SHARING = ("decode_splits_hopper", "shared_prefix_hopper", "prefill_attention_hopper")
"""Modules whose kernels share functions."""


@pytest.mark.parametrize(
    "modules", [SHARING, pytest.param(MODULES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_neither_the_order_nor_the_process_changes_a_cache_key(modules: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    late = ("late", ("shared_prefix_hopper", "prefill_attention_hopper"))
    other_order = ("at once", modules[::-1])
    one, shared, other = keys_of_a_process(("at once", modules), late, other_order)
    assert one == other
    if modules == MODULES:  # one that shares nothing with the first
        assert keys_of_a_process(other_order) == [one]
    assert {key.partition(".")[0] for key in one} == {*modules}
    assert "prefill_attention_hopper._hopper_prefill_kernel" in shared


@pytest.mark.slow
def test_triton_alone_has_other_keys_in_another_order() -> None:
    """Else nothing of this would be needed, and the test above could not fail."""
    pytest.importorskip("triton")
    one, other = keys_of_a_process(("never", SHARING), ("never", SHARING[::-1]))
    assert one != other


if __name__ == "__main__":
    importlib.import_module("torch")
    importlib.import_module("triton")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.starmap(keys_in_order, json.loads(sys.argv[1]), chunksize=1)))
