"""Which kernels of attention a device and a model get, and what is said of them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels.gpu import device_facts
from penstock.kernels.gpu.attention_arguments import DecodeBatch, HeadInputs, Scores
from penstock.kernels.gpu.decode_workspace import decode_workspace
from penstock.kernels.gpu.shared_prefix import shared_prefix
from penstock.services.worker.gpu.attention_choice import (
    DecodeAttention,
    KernelChoice,
    PrefillAttention,
    PrefixAttention,
    TritonDecodeAttention,
    TritonPrefillAttention,
    TritonPrefixAttention,
    choose_decode_attention,
    choose_prefill_attention,
    choose_prefix_attention,
)

HOPPER = "penstock.kernels.gpu.prefill_attention_hopper"
HOPPER_DECODE = "penstock.kernels.gpu.decode_attention_hopper"
HOPPER_PREFIX = "penstock.kernels.gpu.shared_prefix_hopper"


def choice(
    dtype: torch.dtype = torch.bfloat16, dim: int = 128, block_size: int = 16
) -> KernelChoice[PrefillAttention]:
    caches = torch.zeros(2, 2, 3, 2, block_size, dim, dtype=dtype)
    queries = torch.empty(1, 4, dim, dtype=dtype)
    return choose_prefill_attention(caches[0], caches[1], queries)


def decode_choice(
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 128,
    block_size: int = 16,
    heads: int = 4,
    max_rows: int = 5,
) -> KernelChoice[DecodeAttention]:
    keys, values = torch.zeros(2, 2, 3, 2, block_size, dim, dtype=dtype)
    space = decode_workspace(max_rows, heads, 2, dim, torch.device("cpu"))
    triton = TritonDecodeAttention(keys, values, space, 1e-6)
    return choose_decode_attention(keys, values, heads, max_rows, True, 1e-6, triton)


def prefix_choice(
    dtype: torch.dtype = torch.bfloat16, dim: int = 128, block_size: int = 16, heads: int = 4
) -> KernelChoice[PrefixAttention | None]:
    keys, values = torch.zeros(2, 2, 3, 2, block_size, dim, dtype=dtype)
    slot, lengths = torch.zeros(1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    prefix = shared_prefix(slot, lengths, 5, heads, 2, dim)
    return choose_prefix_attention(keys, values, heads, True, 1e-6, prefix)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The device's, to be changed."""
    found = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found[0])
    monkeypatch.setattr(device_facts, "_device_multiprocessors", lambda: 132)
    monkeypatch.setattr(device_facts, "shared_bytes", lambda: 227 * 1024)
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Heads that the Hopper kernel was compiled for; nothing is compiled."""
    module = pytest.importorskip(HOPPER)
    heads: list[int] = []

    class Compiled:
        def __init__(
            self, keys: Tensor, values: Tensor, queries: Tensor, scales: list[float]
        ) -> None:
            heads.append(queries.shape[1])

    monkeypatch.setattr(module, "HopperPrefillAttention", Compiled)
    return heads


@pytest.mark.usefixtures("capability")
def test_a_hopper_gpu_gets_its_own_kernel(compiled: list[int]) -> None:
    for dtype, dim, block_size in (
        (torch.bfloat16, 128, 16), (torch.float16, 64, 8), (torch.bfloat16, 64, 128),
    ):  # fmt: skip
        chosen = choice(dtype, dim, block_size)
        assert not isinstance(chosen.kernels, TritonPrefillAttention)
        assert chosen.summary == "Gluon kernel for Hopper"
    assert compiled == [4, 4, 4]


@pytest.mark.parametrize(
    ("dtype", "dim", "block_size", "words"),
    [
        (torch.float32, 128, 16, "not float32"),
        (torch.bfloat16, 256, 16, "not 256"),
        (torch.bfloat16, 32, 16, "not 32"),
        (torch.bfloat16, 128, 4, "blocks of 8 to 128 in powers of two, not 4"),
        (torch.bfloat16, 128, 256, "not 256"),
    ],
)
@pytest.mark.usefixtures("capability")
def test_a_cache_that_the_hopper_kernel_cannot_read_gets_the_other_one(
    dtype: torch.dtype, dim: int, block_size: int, words: str, compiled: list[int]
) -> None:
    chosen = choice(dtype, dim, block_size)
    assert isinstance(chosen.kernels, TritonPrefillAttention)
    assert chosen.summary.startswith("Triton kernel: ")
    assert words in chosen.reason
    assert not compiled


@pytest.mark.parametrize("other", [(8, 9), (10, 0), (12, 0)])
def test_another_gpu_gets_the_triton_kernel(
    other: tuple[int, int], capability: list[tuple[int, int]], compiled: list[int]
) -> None:
    capability[0] = other
    chosen = choice()
    assert isinstance(chosen.kernels, TritonPrefillAttention)
    assert f"not {other[0]}.{other[1]}" in chosen.reason
    assert not compiled


@pytest.mark.usefixtures("capability")
def test_a_triton_without_gluon_gives_the_triton_kernel_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(
        sys.modules["penstock.kernels.gpu"], HOPPER.rpartition(".")[2], raising=False
    )
    monkeypatch.delitem(sys.modules, HOPPER, raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)  # type: ignore[arg-type]
    chosen = choice()
    assert isinstance(chosen.kernels, TritonPrefillAttention)
    assert "ModuleNotFoundError" in chosen.reason
    assert "triton.experimental.gluon" in chosen.reason


@pytest.mark.usefixtures("capability")
def test_a_gluon_with_other_names_gives_the_triton_kernel_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(
        sys.modules["penstock.kernels.gpu"], HOPPER.rpartition(".")[2], raising=False
    )
    monkeypatch.delitem(sys.modules, HOPPER, raising=False)
    for part in ("language", "nvidia.hopper", "language.nvidia.hopper"):
        name = f"triton.experimental.gluon.{part}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert "ImportError" in choice().reason


@pytest.mark.usefixtures("capability")
def test_a_kernel_that_does_not_compile_gives_the_triton_kernel_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = pytest.importorskip(HOPPER)

    def fail(*arguments: object) -> None:
        raise RuntimeError("unexpected\n  layout")

    monkeypatch.setattr(module, "HopperPrefillAttention", fail)
    chosen = choice()
    assert isinstance(chosen.kernels, TritonPrefillAttention)
    assert chosen.reason == "the kernel for Hopper failed: RuntimeError: unexpected layout"


@pytest.fixture
def compiled_decode(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Heads and rows that the Hopper kernel of decode was compiled for; nothing is compiled."""
    module = pytest.importorskip(HOPPER_DECODE)
    found: list[tuple[int, int]] = []

    class Compiled:
        def __init__(
            self, keys: Tensor, values: Tensor, heads: int, rows: int, *others: object
        ) -> None:
            found.append((heads, rows))

    monkeypatch.setattr(module, "HopperDecodeAttention", Compiled)
    return found


@pytest.mark.usefixtures("capability")
def test_a_hopper_gpu_gets_its_own_kernel_of_decode(compiled_decode: list[tuple[int, int]]) -> None:
    for dim, block_size, heads, rows in ((128, 16, 4, 1), (64, 8, 32, 4096), (128, 256, 2, 64)):
        chosen = decode_choice(torch.bfloat16, dim, block_size, heads, rows)
        assert not isinstance(chosen.kernels, TritonDecodeAttention)
        assert chosen.summary == "Gluon kernel for Hopper"
    assert compiled_decode == [(4, 1), (32, 4096), (2, 64)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float32}, "takes bfloat16, not float32"),
        ({"dtype": torch.float16}, "takes bfloat16, not float16"),
        ({"dim": 256}, "heads of 64 and 128, not 256"),
        ({"block_size": 4}, "blocks of 8 and more in powers of two, not 4"),
        ({"block_size": 24}, "not 24"),
        ({"heads": 34}, "up to 16 heads for a KV head, not 17"),
        ({"max_rows": 4097}, "up to 4096 rows, not 4097"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("capability")
def test_what_the_hopper_kernel_of_decode_cannot_do_the_other_one_does(
    changes: dict[str, Any], words: str, compiled_decode: list[tuple[int, int]]
) -> None:
    chosen = decode_choice(**changes)
    assert isinstance(chosen.kernels, TritonDecodeAttention)
    assert chosen.summary.startswith("Triton kernel: the kernel for Hopper takes ")
    assert words in chosen.reason
    assert not compiled_decode


@pytest.mark.usefixtures("capability")
def test_the_kernel_of_shared_prefixes_is_taken_where_it_can_read_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, compiled = pytest.importorskip(HOPPER_PREFIX), []
    monkeypatch.setattr(module, "HopperPrefixAttention", lambda *args: compiled.append(args[2]))
    changed: list[dict[str, Any]] = [
        {},
        {"dtype": torch.float16},
        {"block_size": 64},
        {"heads": 128},
    ]
    for changes in changed:
        assert prefix_choice(**changes).summary == "Gluon kernel for Hopper"
    assert compiled == [4, 4, 4, 128]
    for changes, words in (
        ({"dtype": torch.float32}, "takes bfloat16 and float16, not float32"),
        ({"dim": 64}, "heads of 128, not 64"),
        ({"block_size": 128}, "blocks of 8 to 64 in powers of two, not 128"),
    ):
        chosen = prefix_choice(**changes)
        assert isinstance(chosen.kernels, TritonPrefixAttention)
        assert words in chosen.reason


@pytest.mark.usefixtures("capability")
def test_no_kernel_of_shared_prefixes_is_taken_for_more_heads_than_one_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for on_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=on_gpu: answer)
        chosen = prefix_choice(heads=130)
        assert chosen.kernels is None
        assert "up to 64 heads for a KV head, not 65" in chosen.summary


@pytest.mark.usefixtures("capability")
def test_decode_and_prefill_are_chosen_apart(
    monkeypatch: pytest.MonkeyPatch, compiled: list[int]
) -> None:
    module = pytest.importorskip(HOPPER_DECODE)

    def fail(*arguments: object) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr(module, "HopperDecodeAttention", fail)
    assert decode_choice().reason == "the kernel for Hopper failed: RuntimeError: no such layout"
    assert choice().reason == ""
    assert compiled == [4]


def test_without_a_gpu_decode_is_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_choice().summary == "Triton kernel: there is no GPU"


SCALES = [Scores(0.25), Scores(0.05)]
"""Of two layers."""


@pytest.mark.usefixtures("capability")
def test_kernels_for_hopper_get_the_scale_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = torch.zeros(2, 2, 3, 2, 16, 128, dtype=torch.bfloat16)
    found: list[object] = []
    for module, name in (
        (HOPPER, "HopperPrefillAttention"),
        (HOPPER_DECODE, "HopperDecodeAttention"),
        (HOPPER_PREFIX, "HopperPrefixAttention"),
    ):
        monkeypatch.setattr(
            pytest.importorskip(module), name, lambda *given: found.append(given[-1])
        )
    queries = torch.empty(1, 4, 128, dtype=torch.bfloat16)
    choose_prefill_attention(keys, values, queries, SCALES)
    space = decode_workspace(5, 4, 2, 128, torch.device("cpu"))
    prefix = shared_prefix(*torch.zeros(2, 5, dtype=torch.int32), 5, 4, 2, 128)
    triton = TritonDecodeAttention(keys, values, space, 1e-6, prefix, SCALES)
    choose_decode_attention(keys, values, 4, 5, True, 1e-6, triton, prefix, SCALES)
    choose_prefix_attention(keys, values, 4, True, 1e-6, prefix, SCALES)
    assert found == [[0.25, 0.05]] * 3


@pytest.mark.usefixtures("capability")
def test_the_kernels_for_hopper_are_made_where_a_layer_has_plain_scores(
    compiled: list[int],
) -> None:
    caches = torch.zeros(2, 2, 3, 2, 16, 128, dtype=torch.bfloat16)
    queries = torch.empty(1, 4, 128, dtype=torch.bfloat16)
    for scores, words in (
        ([Scores(0.25, softcap=20.0)] * 2, "knows no soft cap"),
        ([Scores(0.25, sinks=True)] * 2, "knows no sinks"),
        ([Scores(0.25, 64), Scores(0.25, sinks=True)], "knows no window and no sinks"),
    ):
        assert choose_prefill_attention(*caches, queries, scores).reason.endswith(words)
    assert not compiled
    mixed = [Scores(0.25, softcap=20.0), Scores(0.25)]
    assert choose_prefill_attention(*caches, queries, mixed).summary == "Gluon kernel for Hopper"
    assert compiled == [4]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
def test_a_shared_prefix_is_scaled_as_its_layer() -> None:
    """The same rows with the prefix read once, and with each row reading its own context."""
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 2, 5, 2, 16, 32, generator=generator)
    qkv = torch.randn(3, 8, 32, generator=generator)
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4]], dtype=torch.int32)
    rows, position = torch.arange(3, dtype=torch.int32), torch.tensor([40, 33, 47]).int()
    batch = DecodeBatch(rows, position, table)
    heads = HeadInputs(torch.ones(64, 16), torch.zeros(64, 16), None, None)
    prefix = shared_prefix(rows[:1], torch.full((3,), 32, dtype=torch.int32), 3, 4, 2, 32)
    space = decode_workspace(3, 4, 2, 32, torch.device("cpu"))
    attend = TritonDecodeAttention(keys, values, space, 0.0, prefix, SCALES)
    begin = choose_prefix_attention(keys, values, 4, False, 0.0, prefix, SCALES).kernels
    assert begin is not None
    for layer in (0, 1):
        alone, shared = torch.empty(2, 3, 4, 32)
        attend(layer, qkv, batch, heads, alone)
        begin(layer, qkv, batch, heads)
        attend(layer, qkv, batch, heads, shared, True)
        torch.testing.assert_close(shared, alone)
