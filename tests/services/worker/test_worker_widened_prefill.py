"""Keys and values that are widened for the attention of chunks: their memory, and an executor with
some steps for which there is room and some for which there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import some_prompts
from test_worker_gpu_executor import DEVICE, silent
from torch import Tensor

from penstock.kernels import cache_kinds
from penstock.kernels.cache_kinds import WIDENED_BYTES, KVCacheKind, widened_units
from penstock.kernels.gpu import prefill_attention_hopper, widen_cache
from penstock.kernels.gpu.attention_arguments import LayerCache, Scores
from penstock.kernels.rotary import RopeParameters
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu import executor, layer_attention, static_memory
from penstock.services.worker.gpu.attention_choice import TritonPrefillAttention
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.kernel_choice import KernelChoice
from penstock.services.worker.gpu.static_memory import ExecutorSizes
from penstock.services.worker.gpu.widened_prefill import WidenedPrefill
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model


def config_of(dim: int) -> DenseConfig:
    return DenseConfig(512, 64, 1, 8, 4, dim, 64, 1e-6, RopeParameters(1e4), False)


@pytest.mark.parametrize(
    ("block_size", "slots", "dim"), [(16, 3, 64), (128, 2, 128), (8, 512, 128)]
)
def test_keys_and_values_that_are_widened_are_counted_as_they_are_allocated(
    block_size: int, slots: int, dim: int
) -> None:
    """The last has no room for all contexts of all sequences."""
    capacity = EngineSizes(0, block_size, slots, 48, 1000, 512)
    sizes = ExecutorSizes(config_of(dim), capacity, 2, widens=True)
    width, unit = sizes.table_width, widen_cache.unit_for(block_size)
    units = widened_units(slots, width, 4, dim, 2, unit, block_size)
    table = torch.zeros(slots, width, dtype=torch.int32, device="meta")
    wide = widen_cache.wide_cache(units, 4, block_size, dim, table, torch.bfloat16)
    of_contexts = 4 * 2 * slots
    assert static_memory._widened(sizes) == sum(each.nbytes for each in wide) + of_contexts
    whole = slots * -(-width * block_size // unit)
    assert units == (whole if slots < 512 else WIDENED_BYTES // (2 * 4 * unit * dim * 2))
    assert static_memory._widened(ExecutorSizes(config_of(dim), capacity, 2)) == 0
    assert static_memory._LEAST_UNIT == widen_cache._LEAST_UNIT


@pytest.mark.parametrize(
    ("kind", "dim", "item", "hopper", "widened"),
    [
        ("fp8", 128, 2, True, True), ("int8", 64, 2, True, True), ("auto", 128, 2, True, False),
        ("fp8", 96, 2, True, False), ("fp8", 128, 4, True, False), ("fp8", 128, 2, False, False),
    ],
)  # fmt: skip
def test_keys_are_widened_where_a_kernel_for_hopper_reads_the_models_type(
    kind: KVCacheKind, dim: int, item: int, hopper: bool, widened: bool
) -> None:
    found = static_memory.widens_keys(config_of(dim), kind, item, 16, hopper=hopper)
    assert found is widened


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_tokens_are_the_same_whether_or_not_there_is_room_to_widen_a_steps_contexts(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = read_model_info(tiny_folder("qwen3"))
    model = load_model(info, torch.float32, DEVICE, silent, longest=256)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig), config
    groups = group_layers(model.caches).groups
    sizes = EngineSizes(80, 16, 8, 48, 256, info.vocab_size, groups=groups)
    prompts = some_prompts([20, 30])

    def tokens() -> list[list[int]]:
        dense = dense_model(config, model.specification, model.weights)
        return PlanDriver(dense_executor(*dense, sizes, None, "int8"), 1).run(prompts, 2, chunk=24)

    expected, seen, fitted = tokens(), [], []

    class Attend(TritonPrefillAttention):
        """Stands for the kernel for Hopper."""

        def __init__(
            self, keys: list[Tensor], values: list[Tensor], queries: Tensor, scales: list[float]
        ) -> None:
            super().__init__(keys, values, [Scores(scale) for scale in scales])

    class Watched(WidenedPrefill):
        def __call__(self, layer: int, *step: Any) -> None:
            seen.append(layer)
            super().__call__(layer, *step)

    class Asked(ChunkRows):
        @property
        def fit(self) -> bool:
            fitted.append(self._fit)
            return self._fit

        @fit.setter
        def fit(self, fit: bool) -> None:
            self._fit = fit

    def choose(
        caches: Sequence[LayerCache], queries: Tensor, table: Tensor, scores: Sequence[Scores]
    ) -> KernelChoice[WidenedPrefill | None]:
        scales = [each.scale for each in scores]
        return KernelChoice(Watched(caches, queries, table, scales), "to see", "")

    monkeypatch.setattr(prefill_attention_hopper, "HopperPrefillAttention", Attend)
    monkeypatch.setattr(layer_attention, "choose_widened_prefill", choose)
    monkeypatch.setattr(executor, "ChunkRows", Asked)
    of_unit = 2 * config.num_kv_heads * 64 * config.head_dim * 4
    monkeypatch.setattr(cache_kinds, "WIDENED_BYTES", of_unit)
    assert tokens() == expected
    assert seen
    assert set(fitted) == {True, False}, "two chunks have no room"
