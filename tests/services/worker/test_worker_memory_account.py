"""What is counted of a worker's memory is what it uses, and no more is used later."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import transformers
from support.worker.asked_slots import EVERY_KIND
from support.worker.plan_driver import PlanDriver
from support.worker.pretended_memory import PretendedMemory
from support.worker.tiny_models import FAMILIES, SHARED, VARIANTS, some_prompts
from triton.runtime.interpreter import GridExecutor

from penstock.kernels import attention, sdpa_attention
from penstock.kernels.attention_backend import CacheShape, QuerySpans
from penstock.kernels.gpu import decode_shapes, prefill_attention, sampler_memory, shared_prefix
from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.few_rows_linear import NARROW
from penstock.kernels.rotary import RopeParameters, cos_sin_table
from penstock.kernels.sampling import bad_words
from penstock.protocol.config import (
    CacheConfig,
    Config,
    ConfigError,
    LoadingConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.config.process_fields import LaunchConfig
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.services.worker import model_executor, plain_memory, plan
from penstock.services.worker.gpu import batch_state, compressed_layers, static_memory
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.logprob_rows import GpuLogprobs
from penstock.services.worker.loaded_model import AttentionAlone, LoadedModel
from penstock.services.worker.memory import TIER_STAGING_BYTES
from penstock.services.worker.memory_account import GIB, TOLERANCE, MemoryAccount, MemoryPart, table
from penstock.services.worker.memory_plan import cuda_account, with_kv
from penstock.services.worker.model_memory import ModelMemory, in_use
from penstock.services.worker.model_shape import shape_of
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config, paged_config
from penstock.services.worker.models.dense_form import DenseModel, dense_model, half_tables
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.models.sizes import num_parameters
from penstock.services.worker.models.specification import ModelSpecification, Rotary
from penstock.services.worker.models.weights import allocate_weights

CPU = torch.device("cpu")
Folder = Callable[[str], Path]
NOT_HERE = {"graphs", "outside"}
"""Parts that only a driver takes."""


def specification(variant: str, folder: Path) -> ModelSpecification:
    family, changes = (VARIANTS | FAMILIES)[variant]
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**(SHARED | changes))
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(folder)
    info = read_model_info(folder)
    return adapter_for(info).specification(info)


@pytest.mark.parametrize("variant", [*VARIANTS, *FAMILIES])
def test_the_weights_are_counted_as_they_are_allocated(variant: str, tmp_path: Path) -> None:
    model = specification(variant, tmp_path)
    with PretendedMemory(0) as memory:
        weights = allocate_weights(model, torch.float32, CPU)
        assert num_parameters(model) == memory.held() // 4
    assert weights.embedding.shape[0] == model.vocab_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [*VARIANTS, *FAMILIES])
def test_the_weights_of_the_kernels_are_counted_as_they_are_allocated(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With heads that are filled up, and norms in fp32."""
    model = specification(variant, tmp_path)
    shape = shape_of(model)
    if isinstance(shape.dense, str):
        assert shape.dense_parameters == shape.fp32_norms == 0
        return
    with PretendedMemory(0) as memory:
        weights = allocate_weights(model, dtype, CPU)
        made = dense_model(shape.dense, model, weights)
        del weights
        memory.begin()
        assert plan._dense_bytes(shape, dtype.itemsize) == memory.held()
    assert made.config.head_dim >= model.layers[0].attention.head_dim


def test_rotary_tables_are_the_numbers_of_the_plain_ones_where_a_part_is_rotated() -> None:
    parameters = RopeParameters(1e4, attention_factor=1.5)
    cos, sin = half_tables(Rotary(parameters, 16), 64, 50, CPU)
    whole_cos, whole_sin = cos_sin_table(16, 50, parameters, CPU)
    assert torch.equal(cos[:, :8], whole_cos[:, :8]) and torch.equal(sin[:, :8], whole_sin[:, 8:])
    assert bool((cos[:, 8:] == 1).all()) and not sin[:, 8:].any()
    assert cos.shape == sin.shape == (50, 32)


class Loaded:
    """A tiny model in a memory of so many bytes, and what is counted of it."""

    def __init__(
        self,
        folder: Path,
        memory: PretendedMemory,
        kernels: Callable[[Any], DenseModel | AttentionAlone | str],
        block_size: Literal[8, 16, 64] = 16,
    ) -> None:
        info = read_model_info(folder)
        config = Config(
            model=ModelConfig(model=str(folder), max_model_len=256),
            cache=CacheConfig(block_size=block_size),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48),
        )
        self.memory, self.config, self.info = memory, config, info
        with memory:
            model = load_model(info, torch.float32, CPU, lambda note: None)
            subject = LoadedModel(model, kernels(model))
            measured = ModelMemory(subject, config, info).measured(memory)
            self.account = with_kv(measured, config, info, subject.groups)
            memory.begin()
            self.executor = subject.executor(self.account.sizes)

    def run(self) -> None:
        """Steps of random load; what they ask of the sampler differs. No memory of theirs may wait
        for the collection of cycles."""
        count = len(EVERY_KIND)
        gc.disable()
        try:
            with self.memory:
                prompts = some_prompts([3, 9, *([2] * (count - 2))])
                PlanDriver(self.executor, 1).run(prompts, 2, samplings=EVERY_KIND)
        finally:
            gc.enable()

    def step(self) -> int:
        """What was measured."""
        (step,) = (part.num_bytes for part in self.account.parts if part.name == "step")
        return step - 4 * 4 * plain_memory.GATHERED_ELEMENTS["cuda"] - self.rotary

    @property
    def rotary(self) -> int:
        """Tables of the positions that the profile has not seen."""
        return 4 * 2 * 32 * (256 - 48)

    def counted(self) -> int:
        """But for what only a driver takes."""
        parts = [part for part in self.account.parts if part.name not in NOT_HERE]
        return sum(part.num_bytes for part in parts) + self.account.kv_bytes


def in_form(model: Any) -> DenseModel:
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig), config
    return dense_model(config, model.specification, model.weights)


def attention_alone(model: Any) -> AttentionAlone:
    config = paged_config(model.caches, model.hidden_size, 0, model.vocab_size)
    assert isinstance(config, DenseConfig), config
    return AttentionAlone(config, "to see")


def without_kernels(model: Any) -> str:
    return "on a CPU"


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as a GPU has them."""
    monkeypatch.setattr("penstock.kernels.linear.can_pack", lambda weight: False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
@pytest.mark.parametrize("variant", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("few_programs")
def test_memory_counted_used_and_planned_of_the_kernels_executor_differ_by_under_two_percent(
    variant: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = device_memory(monkeypatch)
    loaded = Loaded(tiny_folder(variant), memory, in_form)
    started = memory.held()
    assert abs(loaded.counted() - started) < TOLERANCE * started
    monkeypatch.setattr(plan, "LIBRARY_BYTES", 0)  # cuBLAS is not used
    planned = plan.Planner(
        loaded.info,
        plan.PlannedDevice("a GPU", 300 << 20, 5 << 20, multiprocessors=multiprocessors()),
    )
    beside = planned.beside_kv(loaded.config)
    assert abs(beside.beside - loaded.account.beside) < TOLERANCE * loaded.counted()
    loaded.run()
    assert memory.peak <= (1 + TOLERANCE) * loaded.counted()


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs", "unpacked")
def test_memory_of_a_model_with_our_attention_alone_is_not_more_than_was_counted(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its layers take in a step was measured; the rest is there from the start."""
    memory = device_memory(monkeypatch)
    loaded = Loaded(tiny_folder("olmo2"), memory, attention_alone)
    assert memory.held() <= loaded.counted()
    loaded.run()
    assert memory.peak <= loaded.counted()
    assert loaded.counted() - memory.peak < 0.05 * loaded.counted()


def share_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels under the interpreter read the arguments themselves. Its views of them are in cycles
    of closures, which keep each argument's memory until cycles are collected; no GPU does."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda _, args, named: (args, named))
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


def device_memory(monkeypatch: pytest.MonkeyPatch) -> PretendedMemory:
    """Of 300 MiB; what executors for GPUs keep on the host is not in it."""
    memory = PretendedMemory(300 << 20, outside=5 << 20)
    share_arguments(monkeypatch)
    for owner, name in (
        (GpuExecutor, "_host"),
        (ChunkRows, "host_buffer"),
        (batch_state.Changes, "_host_buffer"),
        (GpuLogprobs, "_on_host"),
    ):
        monkeypatch.setattr(owner, name, memory.of_host(getattr(owner, name)))
    return memory


@pytest.mark.usefixtures("unpacked")
def test_steps_of_the_plain_executor_take_no_more_than_was_measured(tiny_folder: Folder) -> None:
    """Tables that the sampler takes for the first row that needs them, logits of all rows at once
    and those of a prompt are in what was measured."""
    memory = PretendedMemory(900 << 20)
    loaded = Loaded(tiny_folder("qwen3"), memory, without_kernels)
    started = memory.held()
    loaded.run()
    assert memory.peak - started <= (1 + TOLERANCE) * loaded.step()


@pytest.mark.usefixtures("unpacked")
def test_what_a_step_takes_is_without_the_kv_memory_of_its_profile(tiny_folder: Folder) -> None:
    """The profile of a step in blocks of 64 has three times the KV memory of one in blocks of 8."""
    small, large = (
        Loaded(tiny_folder("qwen3"), PretendedMemory(900 << 20), without_kernels, size).step()
        for size in (8, 64)
    )
    assert abs(small - large) < TOLERANCE * small


def test_attention_of_a_long_chunk_takes_no_more_than_is_counted() -> None:
    heads, kv_heads, dim, start, count = 16, 8, 128, 3000, 300
    width = -(-(start + count) // 128) * 8
    shape = CacheShape(kv_heads, width, 16, dim, heads, torch.float32, exact=True)
    tables = np.arange(width, dtype=np.int64)[None]
    spans = QuerySpans(np.zeros(1, np.int64), np.array([start]), np.array([count]), tables)
    batches = attention.ReferenceAttention().plan(spans, shape, CPU)
    with PretendedMemory(1 << 30) as memory:
        keys, values = torch.zeros(shape[:4]), torch.zeros(shape[:4])
        query = torch.zeros(count, heads, dim)
        memory.begin()
        before = memory.held()
        out = attention.paged_attention(query, keys, values, batches, 1.0)
    taken = memory.peak - before - out.nbytes
    counted = 4 * 4 * plain_memory.GATHERED_ELEMENTS["cpu"]
    assert counted / 2 < taken <= counted


def test_sizes_that_a_plan_knows_without_torch_are_those_of_the_kernels() -> None:
    assert (sampler_memory.SPLIT, sampler_memory.GROUP, sampler_memory.CANDIDATES) == (
        static_memory._SPLIT, static_memory._GROUP, static_memory._CANDIDATES,
    )  # fmt: skip
    assert (bad_words.WORDS, bad_words.WORD_TOKENS, bad_words.RING) == (
        static_memory._WORDS, static_memory._WORD_TOKENS, static_memory._RING,
    )  # fmt: skip
    assert static_memory._QUERY_TILE == prefill_attention.QUERY_TILE
    assert static_memory._DECODE_PROGRAMS == decode_shapes.PROGRAMS_EACH
    assert static_memory._MOST_SPLITS == decode_shapes.MOST_CODES_SPLITS
    assert static_memory._LEAST_GROUP == decode_shapes.LEAST_GROUP
    assert shared_prefix.SHAPE.programs == static_memory._PREFIX_PROGRAMS
    assert shared_prefix.SHAPE.queries == static_memory._PREFIX_QUERIES
    assert static_memory._MOST_PARTS == shared_prefix._MOST_PARTS
    assert static_memory._FIRST_CHANGES == batch_state._FIRST_CHANGES
    assert attention._MAX_TILE_ELEMENTS == plain_memory.GATHERED_ELEMENTS
    assert plain_memory.GATHERED_ELEMENTS["cuda"] == sdpa_attention.MOST_ELEMENTS
    only_large = prefill_attention._LARGE.keys() - prefill_attention._SMALL.keys()
    assert only_large == {(2 * plan._WIDE_HEADS, plan.ITEM_BYTES["float32"])}
    assert model_executor.PROMPT_ROWS == plain_memory._PROMPT_ROWS
    assert plan._NARROW == NARROW
    assert plan._COMPRESSED_SHARE == compressed_layers.COMPRESSED_SHARE
    assert plan._MOST_MEMORY == compressed_layers.MOST_MEMORY
    assert plan._MOST_LEFT == compressed_layers.MOST_LEFT


INFO = ModelInfo(Path("/m"), "x", 100, 1000, "bfloat16", [], {}, {})


def account_of(total: int, share: float = 1.0, **cache: Any) -> tuple[MemoryAccount, Config]:
    """Of a model whose blocks have 1,000 bytes, in a device where others hold 10,000."""
    shares = [] if share == 1.0 else [share]
    config = Config(cache=CacheConfig(memory_share=shares, **cache))
    parts = [MemoryPart("weights", 20_000), MemoryPart("step", 3_000), MemoryPart("step", 2_000)]
    return cuda_account(config, "a GPU", total, parts, 10_000, 1000), config


def test_kv_memory_is_what_the_parts_leave_of_the_share_that_may_be_used() -> None:
    account, config = account_of(100_000, gpu_memory_utilization=0.8)
    planned = with_kv(account, config, INFO, [])
    assert planned.left == 80_000 - 35_000
    assert planned.sizes.num_blocks == 45 - 2
    assert planned.kv_bytes == 45_000
    assert planned.counted == 80_000


def test_a_share_of_the_memory_counts_what_others_hold_against_the_whole() -> None:
    account, config = account_of(100_000, 0.5, gpu_memory_utilization=0.8)
    assert with_kv(account, config, INFO, []).sizes.num_blocks == 40 - 25 - 2


def test_a_model_that_leaves_nothing_for_kv_memory_is_refused_with_the_numbers() -> None:
    account, config = account_of(40_000)
    with pytest.raises(ConfigError, match=r"takes 24.4 KiB, and 24.4 KiB of 39.1 KiB may be used"):
        with_kv(MemoryAccount("x", 40_000, 35_000, "l", account.parts, 1000), config, INFO, [])
    with pytest.raises(ConfigError, match="holds no block of 16 tokens"):
        with_kv(account, config, INFO, [])


@pytest.mark.parametrize(
    ("launch", "hold", "told"),
    [
        ({}, True, ""),
        ({"prepare_engines": True}, False, ""),
        ({"prepare_engines": True}, True, "prepared 2.25 GiB a worker for this one's end"),
        (
            {"prepare_engines": True, "sleep_level": 1},
            True,
            "asleep 2.25 GiB each other model",
        ),
    ],
    ids=str,
)
def test_what_stands_beside_a_worker_is_told_below_what_may_be_used(
    launch: dict[str, Any], hold: bool, told: str
) -> None:
    config = Config(launch=LaunchConfig(**launch), loading=LoadingConfig(hold_weights=hold))
    parts = [MemoryPart("weights", 20 * GIB), MemoryPart("step", 3 * GIB // 2)]
    account = cuda_account(config, "a GPU", 80 * GIB, parts, GIB, 1000)
    below = " ".join(table(account)[-1].split())
    assert below.startswith(told or "usable")
    if told:
        assert "in the 8.0 GiB that are not usable" in below and "too few" not in below
        full = msgspec.structs.replace(config, cache=CacheConfig(gpu_memory_utilization=0.99))
        assert "too few" in table(cuda_account(full, "a GPU", 80 * GIB, parts, GIB, 1000))[-1]
        assert account.counted == 20 * GIB + 3 * GIB // 2 + GIB, "not the worker's own"


def test_what_others_hold_is_not_counted_as_the_models() -> None:
    config = Config(cache=CacheConfig(memory_share=[0.25]))
    weights = [MemoryPart("weights", 30 * GIB, "")]
    account = cuda_account(config, "x", 80 * GIB, weights, 40 * GIB, 1000)
    told = "takes 30.0 GiB, and 18.0 GiB of 80.0 GiB may be used by it .*; 40.0 GiB are the driver"
    with pytest.raises(ConfigError, match=told):
        with_kv(account, config, INFO, [])
    full = cuda_account(Config(), "x", 80 * GIB, weights, 75 * GIB, 1000)
    with pytest.raises(ConfigError, match=r"and 0 bytes of 80.0 GiB .*; 75.0 GiB are the driver"):
        with_kv(full, Config(), INFO, [])


def test_room_for_copies_of_kept_blocks_is_counted() -> None:
    plain, _ = account_of(1 << 30)
    keeping, _ = account_of(1 << 30, kv_tier_memory_bytes=1 << 30)
    assert plain.left - keeping.left == keeping.bytes_of("copies") == TIER_STAGING_BYTES


def test_memory_that_is_in_use_and_was_not_counted_is_told() -> None:
    account, config = account_of(100_000)
    planned = with_kv(account, config, INFO, [])
    for used, overdrawn in ((90_000, False), (91_000, False), (92_000, True)):
        looked = in_use(planned, PretendedMemory(100_000, outside=used))
        assert looked.in_use == used
        assert looked.overdrawn == overdrawn
    assert "2.0 KiB more than counted" in table(looked)[-2]


def test_the_table_is_aligned_and_ends_with_what_fits() -> None:
    account, config = account_of(100_000_000_000)
    lines = table(with_kv(account, config, INFO, []))
    unit = [line.index("MiB") for line in lines[:-1]]
    assert len(set(unit)) == 1
    assert [line.split("  ")[0] for line in lines[:-1]] == [
        "weights", "step", "outside", "KV memory", "unused", "usable",
    ]  # fmt: skip
    assert lines[-1].startswith("longest context 1,000 tokens; 64.0 of that length at once")
