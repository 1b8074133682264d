"""What ``dependent_launch`` finds in kernels with a wait that is missing, and in those without.

That the kernels of the GPU path wait is a test of ``test_kernel_gpu_compiles``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.kernels.dependent_launch import Given, waits

tl: Any = None
gl: Any = None
"""Kernels are read here, never run."""


def jit(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(fn=function)


@jit
def begin(EARLY: Any) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()


def waits_first(x: Any, EARLY: Any) -> None:
    begin(EARLY)
    if x < 0:
        return
    x += 1


def waits_on_both_exits(x: Any) -> None:
    if x == 0:
        tl.extra.cuda.gdc_wait()
        return
    for _ in range(x):
        x += 1
    tl.extra.cuda.gdc_wait()


def returns_before_it_waits(x: Any) -> None:
    if x < 0:
        return
    tl.extra.cuda.gdc_wait()


def never_waits(x: Any) -> None:
    x += 1


def waits_in_a_loop(x: Any) -> None:
    for _ in range(x):
        tl.extra.cuda.gdc_wait()


def waits_on_one_branch(x: Any) -> None:
    if x == 0:
        tl.extra.cuda.gdc_wait()
    else:
        x += 1


def waits_with_or_without(prefix: Any) -> None:
    if prefix is None:
        tl.extra.cuda.gdc_wait()
    if prefix is not None:
        tl.extra.cuda.gdc_wait()


def waits_without(prefix: Any) -> None:
    if prefix is None:
        tl.extra.cuda.gdc_wait()


def returns_early_for_a_pointer(x: Any) -> None:
    if x == 0:
        return
    tl.extra.cuda.gdc_wait()


def changes_its_constant(x: Any, EARLY: Any) -> None:
    EARLY = x > 0
    if EARLY:
        tl.extra.cuda.gdc_wait()


@jit
def multiply(x: Any) -> None:
    x += 1


@jit
def fetch(x: Any) -> None:
    tl.extra.cuda.gdc_wait()
    x += 1


def one_partition_waits(x: Any) -> None:
    gl.warp_specialize([(multiply, (x,)), (fetch, (x,))], [1], [24])


def no_partition_waits(x: Any) -> None:
    gl.warp_specialize([(multiply, (x,)), (multiply, (x,))], [1], [24])


@pytest.mark.parametrize(
    ("kernel", "constants", "expected"),
    [
        (waits_first, {"EARLY": True}, True),
        (waits_first, {"EARLY": False}, False),
        (waits_first, {}, False),
        (waits_on_both_exits, {}, True),
        (returns_before_it_waits, {}, False),
        (never_waits, {}, False),
        (waits_in_a_loop, {}, False),
        (waits_on_one_branch, {}, False),
        (waits_with_or_without, {"prefix": Given()}, True),
        (waits_with_or_without, {"prefix": None}, True),
        (waits_without, {"prefix": None}, True),
        (waits_without, {"prefix": Given()}, False),
        (returns_early_for_a_pointer, {"x": Given()}, False),
        (changes_its_constant, {"EARLY": True}, False),
        (one_partition_waits, {}, True),
        (no_partition_waits, {}, False),
    ],
)
def test_a_kernel_waits_if_each_of_its_exits_lies_behind_a_wait(
    kernel: Callable[..., None], constants: dict[str, Any], expected: bool
) -> None:
    assert waits(kernel, constants) == expected
