"""Quantized checkpoints that are damaged or not read: one error that says what is wrong, before
memory is taken for weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.quantized_folders import (
    WRITERS,
    change_tensors,
    compressed,
    compressed_config,
    gptq,
    set_config,
    write_twins,
)
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker import model_weights
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.quantization.reading import NEAREST, read_quantization

Folder = Callable[[str], Path]
LAYER = "model.layers.1.self_attn.o_proj"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quantized(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a writer, to be copied before it is damaged."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            root = tmp_path_factory.mktemp("quantized")
            found[name] = write_twins(tiny_folder("llama3-wide"), root, WRITERS[name]).quantized
        return found[name]

    return folder


def damaged(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    change_tensors(folder, change)
    return folder


def put(
    name: str, value: float, at: tuple[int, ...] = (0, 0)
) -> Callable[[dict[str, Tensor]], None]:
    """Write a number into a tensor of ``LAYER``."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[LAYER + name][at] = value

    return change


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[LAYER + name]

    return change


def nan_code(tensors: dict[str, Tensor]) -> None:
    tensors[LAYER + ".weight"].view(torch.uint8)[3, 5] = 0xFF


def as_float(tensors: dict[str, Tensor]) -> None:
    tensors[LAYER + ".qweight"] = tensors[LAYER + ".qweight"].float()


def other_groups(tensors: dict[str, Tensor]) -> None:
    """As if groups were twice as large."""
    for name in (".scales", ".qzeros"):
        tensors[LAYER + name] = tensors[LAYER + name][::2].contiguous()


def transposed(tensors: dict[str, Tensor]) -> None:
    tensors[LAYER + ".weight_shape"] = torch.tensor([128, 64])


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "a scale that is NaN": ("gptq-4", put(".scales", float("nan")), r"o_proj\.scales'.*: NaN"),
    "an infinite scale": ("awq", put(".scales", float("inf")), r"o_proj\.scales'.*: infinity"),
    "a negative scale": (
        "fp8-block",
        put(".weight_scale_inv", -0.5),
        r"weight_scale_inv'.*: a scale of -0.5",
    ),
    "a scale that is absurd": (
        "fp8-rows",
        put(".weight_scale", 1e20),
        r"weight_scale'.*: a scale of 1e\+20",
    ),
    "a scale of groups that is NaN": (
        "modelopt-nvfp4",
        put(".weight_scale", float("nan")),
        r"o_proj\.weight_scale'.*: NaN",
    ),
    "a scale of the tensor that is 0": (
        "modelopt-nvfp4",
        put(".weight_scale_2", 0.0, ()),
        r"weight_scale_2'.*: a scale of 0",
    ),
    "no g_idx where inputs are ordered": (
        "gptq-4-ordered",
        drop(".g_idx"),
        r"missing: 'model\.layers\.1\.self_attn\.o_proj\.g_idx'",
    ),
    "a group with an input too many": (
        "gptq-4-ordered",
        put(".g_idx", 1, (slice(0, 3),)),
        r"g_idx'.*: groups of \d+ to \d+ inputs",
    ),
    "a group that is not there": (
        "packed-4-ordered",
        put(".weight_g_idx", 9, (0,)),
        r"weight_g_idx'.*: inputs of groups 0 to 9; there are 4",
    ),
    "another group size": (
        "gptq-4",
        other_groups,
        r"of a wrong shape: .*\.scales'.*: \[2, 128\] instead of \[4, 128\] "
        r"\(GPTQ, 4 bits in groups of 32\)",
    ),
    "codes of another type": (
        "gptq-4",
        as_float,
        r"of a wrong type: .*qweight'.*'F32' instead of I32",
    ),
    "a shape of another layer": (
        "packed-4",
        transposed,
        r"weight_shape'.*: \[128, 64\] for a weight of \[128, 128\]",
    ),
    "no scales": ("fp8-tensor", drop(".weight_scale"), r"missing: .*o_proj\.weight_scale'"),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_before_memory_is_taken_a_folder_is_refused_with_the_tensors_name_for(
    case: str, quantized: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change, message = DAMAGE[case]
    folder = damaged(quantized(name), tmp_path / "model", change)
    monkeypatch.setattr(model_weights, "QuantizedReader", None)
    with pytest.raises(BadModelFolder, match=message):
        load(folder)


def test_codes_that_are_nan_are_found_while_they_are_read(
    quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = damaged(quantized("fp8-block"), tmp_path / "model", nan_code)
    with pytest.raises(
        BadModelFolder, match=r"values that are NaN or infinite: .*1\.self_attn\.o_proj\.weight'"
    ):
        load(folder)


def test_scales_of_caches_and_of_activations_are_not_missed_nor_used(
    quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("k_scale", "v_scale", "k_proj.output_scale"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor([2.0])
        del tensors["model.layers.0.self_attn.o_proj.input_scale"]

    load(damaged(quantized("fp8-tensor"), tmp_path / "model", change))


def test_surplus_tensors_are_named(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[LAYER + ".scalez"] = torch.ones(1)

    with pytest.raises(BadModelFolder, match=r"not of this model: .*o_proj\.scalez"):
        load(damaged(quantized("gptq-4"), tmp_path / "model", change))


def test_layers_that_are_no_whole_groups_are_named(tiny_folder: Folder, tmp_path: Path) -> None:
    """112 inputs of the second half of an MLP."""
    folder = configured(tiny_folder("llama"), tmp_path / "model", gptq(4, 64).config)
    message = r"layers\.0\.mlp\.down_proj as GPTQ, 4 bits in groups of 64: 112 inputs are no groups"
    with pytest.raises(BadModelFolder, match=message):
        load(folder)


def pack_quantized(**weights: Any) -> dict[str, Any]:
    found = compressed(4, 32).config
    found["config_groups"]["group_0"]["weights"] |= weights
    return found


NOT_READ: dict[str, tuple[Any, str]] = {
    "a method without a name": ({}, "quant_method '' is not known; read are awq, compressed"),
    "a method nobody knows": ({"quant_method": "zip"}, "'zip' is not known.*--quantization int8"),
    "no bits": ({"quant_method": "gptq"}, "quantization_config: bits must be 4 or 8, got None"),
    "GPTQ of 3 bits": (gptq(4, 32).config | {"bits": 3}, "bits must be 4 or 8, got 3"),
    "GPTQ of another layout": (
        gptq(4, 32).config | {"checkpoint_format": "marlin"},
        "'marlin': gptq and gptq_v2 are read",
    ),
    "groups of 7": (gptq(4, 7).config, "group_size must be -1 or from 16 on, got 7"),
    "AWQ for another kernel": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
        "gemm alone is read",
    ),
    "FP8 of another layout": ({"quant_method": "fp8", "fmt": "e5m2"}, "e4m3 alone is read"),
    "blocks that are none": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "two positive integers",
    ),
    "ModelOpt's int8": (
        {"quant_method": "modelopt", "quant_algo": "INT8_SQ"},
        "FP8 and NVFP4 are read",
    ),
    "sparse weights": (
        compressed(4, 32).config | {"sparsity_config": {"format": "sparse-bitmask"}},
        "sparse weights are not read",
    ),
    "transforms": (
        compressed(4, 32).config | {"transform_config": {"config_groups": {"R1": {}}}},
        "that go with transforms are not read",
    ),
    "packed floats": (
        pack_quantized(type="float"),
        "4-bit float weights with a scale for each group.* are not read",
    ),
    "groups without a target": (
        compressed_config("pack-quantized", {}) | {"config_groups": {}},
        "no targets",
    ),
    "an expression that is none": (
        compressed(4, 32).config | {"ignore": ["re:("]},
        "no regular expression",
    ),
    "an expression that may take forever": (
        compressed(4, 32).config | {"ignore": ["re:(.*a)*b"]},
        "repeated groups or more than 4 repeats may take forever",
    ),
    "names that are numbers": (compressed(4, 32).config | {"ignore": [3]}, "a list of names"),
}


@pytest.mark.parametrize("case", list(NOT_READ))
def test_the_config_says_what_is_not_read_for(
    case: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    values, message = NOT_READ[case]
    folder = configured(tiny_folder("llama"), tmp_path / "model", values or {"bits": 4})
    with pytest.raises(BadModelFolder, match=message) as failure:
        load(folder)
    assert "config.json: quantization_config" in str(failure.value)


@pytest.mark.parametrize("method", list(NEAREST))
def test_a_method_that_is_not_read_is_told_the_nearest_that_is(
    method: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = configured(tiny_folder("llama"), tmp_path / "model", {"quant_method": method})
    with pytest.raises(
        BadModelFolder, match=f"quant_method {method} is not supported: "
    ) as failure:
        load(folder)
    assert NEAREST[method] in str(failure.value)


def test_what_is_quantized_already_is_not_quantized_again(
    quantized: Callable[[str], Path],
) -> None:
    with pytest.raises(BadModelFolder, match=r"already \(awq\), and --quantization int4 quantizes"):
        read_quantization(read_model_info(quantized("awq")), "int4")


def test_modelopts_own_file_says_it_where_the_config_does_not(
    quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = damaged(quantized("modelopt-fp8"), tmp_path / "model", lambda tensors: None)
    set_config(folder, quantization_config=None)
    text = '{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    (folder / "hf_quant_config.json").write_text(text)
    quantization = read_quantization(read_model_info(folder))
    assert quantization is not None and quantization.title == "FP8 with a scale a row or tensor"
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(BadModelFolder, match=r"hf_quant_config\.json: no object"):
        read_quantization(read_model_info(folder))


def configured(source: Path, folder: Path, quantization: Any) -> Path:
    damaged(source, folder, lambda tensors: None)
    set_config(folder, quantization_config=quantization)
    return folder


def load(folder: Path) -> None:
    load_model(read_model_info(folder), torch.float32, CPU, lambda note: None)
