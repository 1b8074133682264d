"""Capacity, and executors as the worker's process gets them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_encoders import FAMILIES, make_encoder, write_encoder

from penstock.protocol.config import (
    CacheConfig,
    Config,
    ConfigError,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.config.machine import free_host_bytes, read_machine
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_model_info
from penstock.services.worker import ahead_checks, loading
from penstock.services.worker.loading import load_executor
from penstock.services.worker.memory import check_fits, plan_capacity
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.model_loading import choose_device, choose_dtype

Folder = Callable[[str], Path]
KV_BLOCK_BYTES = 16 * 2 * 2 * 2 * 32 * 4
"""Bytes of the tiny model's KV block: positions, K and V, layers, heads, their width, fp32."""


def private_bytes() -> int:
    """Memory that this process has written to and holds for itself."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def config_for(folder: Path | str = "", **parts: Any) -> Config:
    groups: dict[str, dict[str, Any]] = {"model": {"model": str(folder)}, "scheduler": {}}
    groups |= {"cache": {}, "device": {"device": "cpu", "threads": 1}}
    for key, value in parts.items():
        group = next(
            name
            for name, kind in (
                ("model", ModelConfig),
                ("cache", CacheConfig),
                ("scheduler", SchedulerConfig),
                ("device", DeviceConfig),
            )
            if key in kind.__struct_fields__
        )
        groups[group][key] = value
    return Config(
        model=ModelConfig(**groups["model"]),
        cache=CacheConfig(**groups["cache"]),
        scheduler=SchedulerConfig(**groups["scheduler"]),
        device=DeviceConfig(**groups["device"]),
    )


INFO = ModelInfo(Path("/m"), "LlamaForCausalLM", 100, 1000, "float32", [1], {}, {})


def test_blocks_come_from_the_flag_then_the_bytes_then_what_is_free() -> None:
    for parts, blocks in (
        ({"num_kv_blocks": 50, "kv_cache_memory_bytes": 9}, 50),
        ({"kv_cache_memory_bytes": 7_999}, 7),
        ({}, 20),
    ):
        assert plan_capacity(config_for(**parts), INFO, 1000, 20_500).num_blocks == blocks


def test_never_more_blocks_than_the_sequences_can_use() -> None:
    wanted = config_for(max_num_seqs=3, max_model_len=100, num_kv_blocks=10**6)
    assert plan_capacity(wanted, INFO, 1, 10**12).num_blocks == 3 * 7


def test_the_longest_sequence_is_what_model_and_memory_allow() -> None:
    assert plan_capacity(config_for(), INFO, 1, 10**9).max_model_len == 1000
    assert plan_capacity(config_for(), INFO, 1, 10).max_model_len == 160
    assert plan_capacity(config_for(max_model_len=99), INFO, 1, 10).max_model_len == 99


def test_a_length_past_the_model_or_the_memory_names_both() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 1001.*1000 positions"):
        plan_capacity(config_for(max_model_len=1001), INFO, 1, 10**9)
    with pytest.raises(ConfigError, match=r"--max-model-len 161: KV memory holds 160 tokens"):
        plan_capacity(config_for(max_model_len=161, num_kv_blocks=10), INFO, 1, 10)
    with pytest.raises(ConfigError, match="holds no block of 16 tokens"):
        plan_capacity(config_for(kv_cache_memory_bytes=99), INFO, 100, 10**9)


def test_kv_memory_that_is_not_free_is_refused_with_both_numbers() -> None:
    capacity = plan_capacity(config_for(num_kv_blocks=9), INFO, 100, 0)
    check_fits(capacity, 100, 1100)
    with pytest.raises(ConfigError, match="9 blocks need 1100 bytes, 1099 are free"):
        check_fits(capacity, 100, 1099)


def test_free_memory_is_positive() -> None:
    assert 0 < free_host_bytes() < 2**50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_loaded_and_serves_plans(dtype: str, tiny_folder: Folder) -> None:
    notes: list[str] = []
    executor = load_executor(
        config_for(tiny_folder("qwen3"), dtype=dtype, num_kv_blocks=64, max_num_batched_tokens=64),
        notes.append,
    )
    assert executor.capacity.num_blocks == 64
    assert executor.capacity.vocab_size == 307
    assert executor.capacity.max_model_len == 1024
    assert (executor.device, executor.dtype) == ("cpu", dtype)
    assert any("reading weights" in note for note in notes)
    outputs = PlanDriver(executor).run([[1, 2, 3], [4] * 70], 5)
    assert [len(output) for output in outputs] == [5, 5]


def test_kv_memory_takes_nothing_of_the_machine_before_it_is_used(tiny_folder: Folder) -> None:
    config = config_for(
        tiny_folder("qwen3"), kv_cache_memory_bytes=1 << 30, max_num_seqs=2048, threads=1
    )
    before = private_bytes()
    executor = load_executor(config, lambda note: None)
    assert executor.capacity.num_blocks * KV_BLOCK_BYTES > 0.99 * (1 << 30)
    assert private_bytes() - before < 1 << 28


def test_kv_memory_that_the_system_refuses_is_an_error_that_names_the_flags(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> torch.Tensor:
        raise MemoryError("the system refuses 4096 bytes: Cannot allocate memory")

    blocks = config_for(tiny_folder("qwen3"), num_kv_blocks=77, threads=1)
    from_here = "penstock.services.worker.kv_memory.allocate_kv_cache"
    beside = MemoryAccount("cpu", 1 << 30, 1 << 30, "all of it", [], KV_BLOCK_BYTES)
    monkeypatch.setattr("penstock.services.worker.model_memory.beside_kv", lambda *_: beside)
    monkeypatch.setattr(from_here, refuse)
    with pytest.raises(ConfigError, match=r"77 blocks: .*4096 bytes.*lower --num-kv-blocks"):
        load_executor(blocks, lambda note: None)


@pytest.mark.parametrize(("multiplies", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_dtype_is_the_checkpoints_or_what_the_cpu_multiplies_fast(
    multiplies: bool, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = torch.device("cpu")
    machine = msgspec.structs.replace(read_machine(), multiplies_bf16=multiplies)
    monkeypatch.setattr(ahead_checks, "read_machine", lambda: machine)

    def info(dtype: str) -> ModelInfo:
        return ModelInfo(tmp_path, "x", 1, 1, dtype, [], {}, {})

    for stored in ("bfloat16", "float16"):
        assert choose_dtype("auto", info(stored), cpu) == getattr(torch, expected)
    assert choose_dtype("bfloat16", info("bfloat16"), cpu) == torch.bfloat16
    assert choose_dtype("auto", info("bfloat16"), torch.device("cuda")) == torch.bfloat16
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(free_host_bytes() // 3)  # in float32 two thirds of what is free
    assert choose_dtype("auto", info("bfloat16"), cpu) == torch.bfloat16


def test_dtypes_that_nothing_computes_in_are_refused_and_float64_is_read_as_float32() -> None:
    cpu = torch.device("cpu")

    def info(dtype: str) -> ModelInfo:
        return ModelInfo(Path("/m"), "x", 1, 1, dtype, [], {}, {})

    assert choose_dtype("auto", info("float16"), torch.device("cuda")) == torch.float16
    assert choose_dtype("float32", info("bfloat16"), cpu) == torch.float32
    with pytest.raises(ConfigError, match="--dtype float16"):
        choose_dtype("float16", info("float32"), cpu)
    assert choose_dtype("auto", info("float64"), cpu) == torch.float32
    with pytest.raises(BadModelFolder, match=r"'int4'; supported are .*with --dtype"):
        choose_dtype("auto", info("int4"), cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_cuda_device_is_a_clear_error() -> None:
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="--device cpu"):
        choose_device("cuda")


def test_a_missing_folder_is_a_clear_error() -> None:
    for device in ("cpu", "null"):
        with pytest.raises(BadModelFolder, match="no such folder"):
            load_executor(config_for("/nonexistent", device=device), lambda note: None)


def test_the_null_engine_follows_the_config_of_the_folder(tiny_folder: Folder) -> None:
    folder = tiny_folder("llama")
    executor = load_executor(
        config_for(folder, device="null", max_num_seqs=2, num_kv_blocks=500), lambda note: None
    )
    assert executor.capacity.vocab_size == read_model_info(folder).vocab_size
    assert executor.capacity.num_blocks == 2 * 1024 // 16
    assert (executor.device, executor.dtype) == ("null", "")
    outputs = PlanDriver(executor).run([[1]], 400)
    assert 306 not in outputs[0]


def test_the_null_worker_imports_neither_torch_nor_transformers(tiny_folder: Folder) -> None:
    code = (
        "import sys\n"
        "from penstock.protocol.config import Config, DeviceConfig, ModelConfig\n"
        "from penstock.services.worker.loading import load_executor\n"
        "model, device = ModelConfig(model=sys.argv[1]), DeviceConfig(device='null')\n"
        "config = Config(model=model, device=device)\n"
        "load_executor(config, print)\n"
        "bad = {'torch', 'transformers', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_folder("llama"))], check=True, timeout=60)


@pytest.mark.parametrize("variant", ["gemma2", "an encoder"])
def test_blocks_that_cannot_be_kept_are_refused_before_weights_are_read(
    variant: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path
    if variant == "an encoder":
        write_encoder(make_encoder(next(iter(FAMILIES))), tmp_path)
    else:
        folder = tiny_folder(variant)
    monkeypatch.setattr(loading, "_load", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match="keep blocks of models with one kind of attention"):
        load_executor(config_for(folder, kv_tier_memory_bytes=1 << 20), lambda note: None)
