"""Executors whose keys and values take a byte a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.worker.oracle_drafts import speculating
from support.worker.plan_driver import PlanDriver
from support.worker.ranks_in_threads import ranks_of
from support.worker.tiny_models import some_prompts

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.kv_cache import read_blocks
from penstock.protocol.config import CacheConfig, ClusterConfig, Config, ConfigError, ModelConfig
from penstock.protocol.config.fields import SpeculationConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.kv_cache_checks import check_for_gpu, check_kernels
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.loaded_model import LoadedModel
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.plain_attention import REFERENCE
from penstock.services.worker.plan import PlannedDevice, Planner

CPU = torch.device("cpu")
KINDS: list[KVCacheKind] = ["int8", "fp8"]
Folder = Callable[[str], Path]


def executor_for(
    folder: Path, kind: KVCacheKind, of: type[ModelExecutor] = ModelExecutor
) -> ModelExecutor:
    info = read_model_info(folder)
    model = load_model(info, torch.float32, CPU, lambda note: None, longest=512)
    groups = group_layers(model.caches).groups
    sizes = EngineSizes(300, 8, 16, 256, 512, info.vocab_size, groups=groups)
    return of(model, sizes, REFERENCE, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_tokens_do_not_depend_on_chunks_batches_and_preemptions(
    variant: str, kind: KVCacheKind, tiny_folder: Folder
) -> None:
    """Also of layers with a window, which give blocks back."""
    prompts = some_prompts([1, 33, 5, 140])
    wholes = PlanDriver(executor_for(tiny_folder(variant), kind), 0).run(prompts, 8, chunk=10_000)
    pieces = PlanDriver(executor_for(tiny_folder(variant), kind), 1)
    assert pieces.run(prompts, 8, chunk=20, preemptions=3) == wholes
    plain = PlanDriver(executor_for(tiny_folder(variant), "auto"), 0).run(prompts, 8, chunk=10_000)
    firsts = [(one[0], other[0]) for one, other in zip(wholes, plain, strict=True)]
    assert sum(one == other for one, other in firsts) >= 3, "a tiny model's tokens are mostly kept"


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(kind: KVCacheKind, tiny_folder: Folder) -> None:
    prompts = some_prompts([1, 33, 64])
    plain = PlanDriver(executor_for(tiny_folder("llama"), kind, DraftingExecutor), 1)
    expected = plain.run(prompts, 12, chunk=100)
    executor = executor_for(tiny_folder("llama"), kind, DraftingExecutor)
    assert isinstance(executor, DraftingExecutor)
    speculating(executor, list(zip(prompts, expected, strict=True)))
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, 12, chunk=50, preemptions=2) == expected
    assert max(driver.row_counts) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_divide_the_heads_give_the_tokens_of_one(
    kind: KVCacheKind, tiny_folder: Folder
) -> None:
    folder, prompts = tiny_folder("llama"), some_prompts([1, 33, 64])
    whole = executor_for(folder, kind)
    expected = PlanDriver(whole, 1).run(prompts, 6, chunk=50)
    with ranks_of(folder, 2, 1, whole.capacity, kind=kind) as ranks:
        assert PlanDriver(ranks, 1).run(prompts, 6, chunk=50) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_is_counted_and_half_of_what_it_was(
    kind: KVCacheKind, tiny_folder: Folder
) -> None:
    folder = tiny_folder("llama")
    executor = executor_for(folder, kind)
    held = sum(cache.nbytes for cache in executor._memory.caches)
    subject = LoadedModel(executor._model, "on a CPU", kind=kind)
    blocks = executor.capacity.num_blocks + EXTRA_BLOCKS
    assert held == blocks * subject.block_bytes(8)
    info = read_model_info(folder)
    config = Config(
        model=ModelConfig(model=str(folder), dtype="bfloat16"),
        cache=CacheConfig(kv_cache_dtype=kind, block_size=8, kv_cache_memory_bytes=1 << 20),
    )
    device = PlannedDevice("cpu", 2 << 30)
    account = Planner(info, device).account(config)
    assert account.block_bytes == subject.block_bytes(8)
    plain = replace(config, cache=replace(config.cache, kv_cache_dtype="auto"))
    tokens = Planner(info, device).account(plain).kv_tokens
    dim = executor._model.caches[0].head_dim
    assert account.kv_tokens == pytest.approx(tokens * 2 * dim / (dim + 4), rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_is_taken_out_and_put_elsewhere_is_the_same(
    kind: KVCacheKind, tiny_folder: Folder
) -> None:
    executor = executor_for(tiny_folder("llama"), kind)
    PlanDriver(executor, 0).run(some_prompts([60]), 1)
    blocks = executor.kv_blocks
    assert blocks is not None

    def numbers(block: int) -> list[torch.Tensor]:
        layers = [cache for pair in executor._memory.layers for cache in pair]
        return [
            read_blocks(cache, torch.tensor([block, 300 + EXTRA_BLOCKS + block]), torch.float32)
            for cache in layers
        ]

    used = next(block for block in range(300) if numbers(block)[0].any())
    other = next(block for block in range(300) if not numbers(block)[0].any())
    content = memoryview(bytearray(blocks.block_bytes))
    blocks.read(used, content)
    blocks.write(other, content)
    assert all(map(torch.equal, numbers(used), numbers(other)))


def test_blocks_of_other_kinds_lie_in_other_spaces(tiny_folder: Folder) -> None:
    kinds: list[KVCacheKind] = ["auto", *KINDS]
    found = [executor_for(tiny_folder("llama"), kind).kv_blocks for kind in kinds]
    assert len({blocks.layout for blocks in found if blocks is not None}) == 3


def test_what_has_not_been_checked_on_gpus_is_refused() -> None:
    config, cuda = Config(cache=CacheConfig(kv_cache_dtype="fp8_e4m3")), torch.device("cuda")
    divided = replace(config, cluster=ClusterConfig(tensor_parallel_size=2))
    check_kernels(config, CPU, "computed on a CPU")
    ampere = (8, 6)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3 needs .* 8.9, .* has 8.6;"):
        check_for_gpu(config, ampere)
    check_for_gpu(replace(config, cache=CacheConfig(kv_cache_dtype="int8")), ampere)
    with pytest.raises(ConfigError, match="fp8_e4m3 works on one GPU"):
        check_for_gpu(divided, ampere)
    drafting = replace(config, speculation=SpeculationConfig(speculative="suffix"))
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3 and --speculative suffix"):
        check_for_gpu(drafting, ampere)
    kept = CacheConfig(kv_cache_dtype="int8", kv_tier_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 and --kv-tier-memory-bytes"):
        check_for_gpu(replace(config, cache=kept), ampere)
    check_kernels(config, cuda, "")
    with pytest.raises(ConfigError, match="operations would: heads of 18; leave it out"):
        check_kernels(config, cuda, "heads of 18")
