"""Which models have compressed weights, what is said of it, and what comes before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from support.worker.sharp_model import CONFIG as SMALL

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import read_model_info
from penstock.services.worker import model_memory, model_weights
from penstock.services.worker.gpu import needed_kernels
from penstock.services.worker.gpu.compressed_layers import (
    Compression,
    compress_layers,
    no_compression,
)
from penstock.services.worker.kernel_needs import COMPRESSED
from penstock.services.worker.loaded_model import LoadedModel
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import DenseWeights
from penstock.services.worker.models.dense_form import DenseModel, allocate_dense

CPU = torch.device("cpu")
WIDE = msgspec.structs.replace(
    SMALL, hidden_size=2048, num_heads=2, num_kv_heads=1, head_dim=64, intermediate_size=128,
    vocab_size=100, num_layers=1,
)  # fmt: skip
GIB = 1 << 30
COMPRESS = "penstock.kernels.gpu.compressed_weights.compress"


def weights_of(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> DenseWeights:
    weights = allocate_dense(msgspec.structs.replace(WIDE, **sizes), dtype, CPU)
    torch.manual_seed(0)
    for layer in weights.layers:
        for linear in layer.linears:
            linear.weight.normal_(0.0, 0.02)
    weights.lm_head.weight.normal_(0.0, 0.02)
    return weights


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU with 10 GiB, all free, and Triton with Gluon."""
    pytest.importorskip("penstock.kernels.gpu.compressed_linear_hopper")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10 * GIB, 10 * GIB))


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
def test_all_weights_of_a_model_that_fits_are_compressed_and_the_log_says_how_large_they_are() -> (
    None
):
    weights = weights_of(vocab_size=64)
    linears = [*weights.layers[0].linears, weights.lm_head]
    plain = [linear.num_bytes for linear in linears]
    compression = compress_layers(weights, 0.9)
    assert compression.linears == linears
    assert all(
        0.7 * before < linear.num_bytes - before < 0.9 * before
        for linear, before in zip(linears, plain, strict=True)
    )
    assert compression.summary == "weights are compressed, too, for few rows (0.0 GiB)"
    odd = compress_layers(weights_of(vocab_size=100), 0.9)
    assert len(odd.linears) == 4
    assert "but for lm_head: 100 x 2048 numbers; multiples of 64 x 128 are" in odd.summary
    assert compression.drop("of the test")
    assert not compression.linears
    assert [linear.num_bytes for linear in linears] == plain
    assert compression.summary == "weights are not compressed: of the test"
    assert not compression.drop("of the test")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("dtype", "sizes", "reason"),
    [
        (torch.float16, {}, "only bfloat16 is, not float16"),
        (torch.bfloat16, {"hidden_size": 1024}, "steps of 1024 columns are not bound by"),
        (
            torch.bfloat16,
            {"intermediate_size": 96},
            "compressed: mlp.gate_proj and mlp.up_proj of layer 0: 192 x 2048 numbers;",
        ),
    ],
    ids=str,
)
def test_weights_that_cannot_be_compressed_stay_plain_and_the_log_says_why(
    dtype: torch.dtype, sizes: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMPRESS, lambda weight, **how: weight)
    weights = weights_of(dtype, **sizes)
    compression = compress_layers(weights, 0.9)
    assert not compression.linears
    assert all(linear.compressed is None for linear in weights.layers[0].linears)
    assert compression.summary.startswith("weights are not compressed: ")
    assert reason in compression.summary


@pytest.mark.usefixtures("hopper")
def test_kernels_are_found_ahead_for_a_model_whose_weights_cannot_be_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(COMPRESS, lambda weight, **how: weight)
    config = msgspec.structs.replace(WIDE, intermediate_size=96)
    weights = allocate_dense(config, torch.bfloat16, torch.device("meta"))
    compression = needed_kernels._compression(DenseModel(config, weights), COMPRESSED)
    assert not compression.linears
    assert "192 x 2048 numbers; multiples of" in compression.summary


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("total", "utilization"), [(0.05, 0.9), (0.5, 0.05)])
def test_weights_that_would_take_more_than_a_sixth_of_the_memory_stay_plain(
    total: float, utilization: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = int(total * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (size, size))
    summary = compress_layers(weights_of(vocab_size=6400), utilization).summary
    assert "that takes 0.0 GiB; 0.0 may be used, a sixth of what --gpu-memory-util" in summary


@pytest.mark.usefixtures("hopper")
def test_weights_stay_plain_where_other_processes_hold_most_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GIB + 1000, 10 * GIB))
    assert "0.0 may be used" in compress_layers(weights_of(), 0.9).summary


def test_without_a_gpu_of_the_kind_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compression = compress_layers(weights_of(), 0.9)
    assert compression.summary == "weights are not compressed: there is no GPU"


@pytest.fixture
def planning(tiny_folder: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plan memory for a model whose compressed weights leave room for 10 blocks of 40."""
    info = read_model_info(Path(tiny_folder("qwen3")))
    model = model_weights.random_model(info, torch.float32, CPU, 0)
    size = LoadedModel(model, "on a CPU").block_bytes(16)

    def beside(subject: LoadedModel, *others: object) -> MemoryAccount:
        compression = subject.compression
        assert isinstance(compression, Compression)
        blocks = EXTRA_BLOCKS + (10 if compression.linears else 40)
        return MemoryAccount("a GPU", blocks * size, blocks * size, "all of it", [], size)

    monkeypatch.setattr(model_memory, "beside_kv", beside)

    def plan(compression: Compression, blocks: int | None, **cache: int) -> int:
        length = None if blocks is None else blocks * 16
        config = Config(
            model=msgspec.structs.replace(Config().model, max_model_len=length),
            cache=msgspec.structs.replace(Config().cache, **cache),
        )
        subject = LoadedModel(model, "on a CPU", compression=compression)
        planned = model_memory.plan_memory(subject, config, info)
        assert isinstance(model, Decoder)
        return planned.sizes.num_blocks

    return plan


def compressed() -> Compression:
    return Compression("compressed", [weights_of().lm_head])


def test_compressed_weights_leave_the_kv_cache_what_was_asked_for(planning: Any) -> None:
    kept, dropped = compressed(), compressed()
    assert planning(kept, 8) == 10
    assert kept.linears
    assert planning(dropped, 15) == 40
    assert not dropped.linears
    assert "not compressed: --max-model-len 240: KV memory holds 160 tokens" in dropped.summary


def test_compressed_weights_leave_room_for_a_sequence_of_the_models_length(planning: Any) -> None:
    compression = compressed()
    assert planning(compression, None) == 40
    assert "beside them KV memory holds 160 tokens, not " in compression.summary


def test_compressed_weights_stay_beside_a_small_kv_cache_that_was_asked_for(planning: Any) -> None:
    compression = compressed()
    assert planning(compression, None, num_kv_blocks=5) == 5
    assert compression.linears


def test_a_kv_cache_that_has_no_room_without_them_either_is_an_error(planning: Any) -> None:
    for compression in (compressed(), no_compression("never")):
        with pytest.raises(ConfigError, match="KV memory"):
            planning(compression, 41)
