"""``--quantization``: plain weights are rounded while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.pretended_memory import PretendedMemory
from support.worker.quantized_folders import WRITERS, write_twins
from support.worker.tiny_models import some_prompts
from torch import Tensor

from penstock.protocol.config import (
    CacheConfig,
    Config,
    ConfigError,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker import plan
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.loading import load_executor
from penstock.services.worker.memory_account import TOLERANCE
from penstock.services.worker.model_weights import load_model, random_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.quantized_linear import QuantizedLinear

Folder = Callable[[str], Path]
Kind = Literal["int8", "int4", "fp8"]
CPU = torch.device("cpu")
MOST_ERROR = {"int8": 0.012, "int4": 0.13, "fp8": 0.04}
"""Of a weight of normally distributed numbers, relative."""


def load(folder: Path, online: str, **options: Any) -> Decoder:
    info = read_model_info(folder)
    return load_model(info, torch.float32, CPU, lambda note: None, online=online, **options)


def exact(linear: Any) -> Tensor:
    """The numbers that a linear layer multiplies with."""
    if not linear.quantized:
        return linear.weight
    return torch.cat([piece.dequantized() for piece in linear.pieces])


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_every_linear_layer_is_near_the_plain_one(kind: Kind, tiny_folder: Folder) -> None:
    plain, rounded = (
        load(tiny_folder("llama3-wide"), "none"),
        load(tiny_folder("llama3-wide"), kind),
    )
    for layer, other in zip(plain.weights.layers, rounded.weights.layers, strict=True):
        for linear, coded in zip(layer.linears, other.linears, strict=True):
            assert isinstance(coded, QuantizedLinear)
            error = (exact(coded) - linear.weight).norm() / linear.weight.norm()
            assert 0 < float(error) < MOST_ERROR[kind]
    head = rounded.weights.lm_head
    assert head.quantized
    difference = (exact(head) - plain.weights.lm_head.weight).norm()
    assert float(difference) < MOST_ERROR["int8"] * float(plain.weights.lm_head.weight.norm())


def test_int4_needs_groups_and_where_inputs_have_none_the_layer_is_int8(
    tiny_folder: Folder,
) -> None:
    """112 inputs."""
    linears: Any = load(tiny_folder("llama"), "int4").weights.layers[0].linears
    kinds = [{piece.kind for piece in linear.pieces} for linear in linears]
    assert kinds == [{"int4"}, {"int4"}, {"int4"}, {"int8"}]


def test_an_lm_head_that_is_the_embedding_is_a_second_form_of_it(tiny_folder: Folder) -> None:
    weights = load(tiny_folder("qwen3"), "int4").weights
    assert weights.lm_head.quantized and weights.embedding.dtype == torch.float32
    error = (exact(weights.lm_head) - weights.embedding).norm() / weights.embedding.norm()
    assert float(error) < MOST_ERROR["int8"]


def test_nobody_who_asks_for_no_logits_pays_for_an_lm_head(tiny_folder: Folder) -> None:
    weights = load(tiny_folder("qwen3"), "int8", headless=True).weights
    assert weights.lm_head.weight is weights.embedding


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_never_more_than_one_layer_is_there_twice(kind: Kind, tiny_folder: Folder) -> None:
    folder = tiny_folder("llama3-wide")
    plain = load(folder, "none")
    layer = 4 * sum(each.specification.num_parameters for each in plain.weights.layers[0].linears)
    whole = plain.weight_bytes
    del plain
    memory = PretendedMemory(0)
    with memory:
        model = load(folder, kind)
        memory.begin()
        held = memory.held()
    memory = PretendedMemory(0)
    with memory:
        again = load(folder, kind)
    # Numbers in fp32 of the part that is rounded at the time, several times over.
    part = 4 * max(each.specification.num_parameters for each in model.weights.layers[0].linears)
    assert held < whole / 2
    assert memory.peak < held + layer + 8 * part
    assert again.weight_bytes == model.weight_bytes


def test_reading_is_told_as_one_from_its_begin_to_its_end(tiny_folder: Folder) -> None:
    notes: list[str] = []
    reports: list[LoadReport] = []
    info = read_model_info(tiny_folder("llama3-wide"))
    load_model(info, torch.float32, CPU, notes.append, reports.append, online="int8")
    shares = [int(note.split()[2].rstrip("%:")) for note in notes if note.startswith("reading")]
    assert shares == sorted(shares) and shares[-1] == 100
    (report,) = reports
    assert report.done_bytes == sum(
        tensor.numel() * 4 for tensor in stored(tiny_folder("llama3-wide")).values()
    )


def stored(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def config_for(folder: Path, **model: Any) -> Config:
    return Config(
        model=ModelConfig(model=str(folder), max_model_len=256, **model),
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        device=DeviceConfig(device="cpu", threads=1),
    )


@pytest.mark.parametrize("kind", ["int8", "int4", "gptq-4", "fp8-block"])
def test_a_server_generates_with_it_and_its_memory_is_what_is_planned(
    kind: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder, settings = tiny_folder("qwen3"), {"quantization": kind}
    if kind in WRITERS:
        source = tiny_folder("llama3-wide")
        folder, settings = write_twins(source, tmp_path, WRITERS[kind]).quantized, {}
    config = config_for(folder, dtype="float32", **settings)
    executor: Any = load_executor(config, lambda note: None)
    prompts = some_prompts([5, 40])
    outputs = PlanDriver(executor, 4).run(prompts, 6)
    assert [len(output) for output in outputs] == [6, 6]
    (measured,) = (part for part in executor.account.parts if part.name == "weights")
    planner = plan.Planner(read_model_info(folder), plan.PlannedDevice("cpu", 1 << 34))
    (told,) = (part for part in planner.beside_kv(config).parts if part.name == "weights")
    assert abs(told.num_bytes - measured.num_bytes) < TOLERANCE * measured.num_bytes
    assert "quantized" in told.note and "quantized" in measured.note


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_random_weights_have_the_form_too(kind: Kind, tiny_folder: Folder) -> None:
    info = read_model_info(tiny_folder("llama3-wide"))
    model = random_model(info, torch.float32, CPU, 0, online=kind)
    loaded = load(tiny_folder("llama3-wide"), kind)
    assert model.weight_bytes == loaded.weight_bytes


def test_fp8_on_a_cpu_is_refused_with_what_to_use(tiny_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="CPUs do not multiply FP8; int8 takes as much"):
        load_executor(config_for(tiny_folder("llama"), quantization="fp8"), lambda note: None)


def test_a_model_of_transformers_code_stays_plain(tiny_folder: Folder) -> None:
    config = config_for(tiny_folder("nemotron"), quantization="int8")
    message = r"--quantization int8, and NemotronForCausalLM is computed by transformers' code"
    with pytest.raises(BadModelFolder, match=message):
        load_executor(config, lambda note: None)
