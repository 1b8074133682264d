"""Kernels are found again in Triton's cache, whichever of two threads was first to ask for one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

PRODUCTS = ("rows_linear_hopper", "compressed_linear_hopper")
GATED = ("gated_linear_hopper",)
ATTENTION = (
    "decode_plan", "decode_splits_hopper", "shared_prefix_hopper", "prefill_attention_hopper",
)  # fmt: skip
"""Begun at the same time by ``GpuDecoder``: a thread each, attention in this order."""
DRAW = ("draw",)
CHOICES = ("adjust_logits", "keep_floor", "token_history", "logprobs")
PADDING = (
    "norm", "rope_cache", "slots", "activation", "decode_attention", "prefill_attention",
    "shared_prefix", "few_rows_linear", "skinny_linear",
)  # fmt: skip
"""Those of ``GpuExecutor.warm_up``: the first alone, then a thread each."""


def keys_in_order(modules: list[str]) -> dict[str, str]:
    """What Triton finds each kernel of the modules by, hashed in their order."""
    from triton.runtime.jit import JITFunction

    keys = {}
    for name in modules:
        module = importlib.import_module(f"penstock.kernels.gpu.{name}")
        for attribute, kernel in vars(module).items():
            if isinstance(kernel, JITFunction) and attribute.endswith("kernel"):
                keys[f"{name}.{attribute}"] = kernel.cache_key
    return keys


def keys_of_a_process(modules: tuple[str, ...]) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, *modules],
        capture_output=True, check=True, timeout=100, env=environment,
    )  # fmt: skip
    keys: dict[str, str] = json.loads(done.stdout)
    return keys


@pytest.mark.parametrize(
    ("first", "orders"),
    [
        ((), [(PRODUCTS, GATED, ATTENTION), (ATTENTION, GATED, PRODUCTS)]),
        (ATTENTION + DRAW, [(CHOICES, PADDING), (PADDING, CHOICES)]),
    ],
    ids=["decoder", "warm-up"],
)
def test_the_order_of_threads_changes_no_cache_key(
    first: tuple[str, ...], orders: list[tuple[tuple[str, ...], ...]]
) -> None:
    pytest.importorskip("triton")
    one, other = (keys_of_a_process(sum(order, first)) for order in orders)
    assert one == other
    assert {key.partition(".")[0] for key in one} == {*sum(orders[0], first)}


def test_the_order_matters_among_kernels_that_share_functions() -> None:
    """Else nothing of this would be needed, and the test above could not fail."""
    pytest.importorskip("triton")
    one, other = keys_of_a_process(ATTENTION), keys_of_a_process(ATTENTION[::-1])
    assert one.keys() == other.keys()
    assert one != other


if __name__ == "__main__":
    print(json.dumps(keys_in_order(sys.argv[1:])))
