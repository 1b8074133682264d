"""Quantized checkpoints by the documented layout of each format, and their dequantized twins.

A writer rounds a weight [N, K] and packs it as its format's own library does, with loops of its own
rather than with our code, and says which numbers the result stands for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Stored(NamedTuple):
    tensors: dict[str, Tensor]
    """By what follows the layer's name."""
    weight: Tensor
    """The numbers that they stand for, fp32 [N, K]."""


class Writer(NamedTuple):
    config: dict[str, Any]
    """``quantization_config``."""
    store: Callable[[Tensor], Stored]


def packed(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, C] of integers → int32 [R, C * bits / 32], along columns."""
    each = 32 // bits
    order = order or tuple(range(each))
    words = torch.zeros(codes.shape[0], codes.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        words |= codes[:, order[place] :: each].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def rounded(
    weight: Tensor, bits: int, groups: Tensor, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes [N, K], scales and zeros [N, G], and the numbers; groups: of each input."""
    count, most = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.zeros(len(weight), count), torch.zeros(len(weight), count)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            scales[:, group] = torch.maximum(-low, high) * 2 / most
            zeros[:, group] = (most + 1) // 2
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, most)
    scales = scales.to(dtype)
    wide, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / wide + zero).round().clamp(0, most)
    return codes, scales, zeros, (codes - zero) * wide


def in_groups(inputs: int, size: int) -> Tensor:
    return torch.arange(inputs) // (inputs if size < 0 else size)


def mixed_groups(inputs: int, size: int) -> Tensor:
    """As with ``desc_act``: the inputs of a group lie anywhere."""
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    return in_groups(inputs, size)[order]


def gptq(
    bits: int, size: int, *, ordered: bool = False, version: int = 1, symmetric: bool = False
) -> Writer:
    def store(weight: Tensor) -> Stored:
        inputs = weight.shape[1]
        groups = mixed_groups(inputs, size) if ordered else in_groups(inputs, size)
        codes, scales, zeros, numbers = rounded(weight, bits, groups, symmetric)
        stored_zeros = zeros if version == 2 else zeros - 1
        stored_zeros = stored_zeros.long() % 2**bits  # -1 cannot be kept: see below
        if version == 1:
            numbers = (codes - (stored_zeros.float() + 1)[:, groups]) * scales.float()[:, groups]
        tensors = {
            ".qweight": packed(codes, bits).t().contiguous(),
            ".qzeros": packed(stored_zeros.t().contiguous(), bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": groups.int(),
        }
        return Stored(tensors, numbers)

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered,
        "sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return Writer(config, store)


def awq(size: int) -> Writer:
    def store(weight: Tensor) -> Stored:
        groups = in_groups(weight.shape[1], size)
        codes, scales, zeros, numbers = rounded(weight, 4, groups, symmetric=False)
        tensors = {
            ".qweight": packed(codes.t().contiguous(), 4, AWQ_ORDER),
            ".qzeros": packed(zeros.t().contiguous(), 4, AWQ_ORDER),
            ".scales": scales.t().contiguous(),
        }
        return Stored(tensors, numbers)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return Writer(config | {"zero_point": True, "modules_to_not_convert": None}, store)


def fp8(block: int | None = None, rows: bool = False, method: str = "fp8") -> Writer:
    """block: rows and columns of a block; rows: whether each row has a scale."""

    def store(weight: Tensor) -> Stored:
        outputs, inputs = weight.shape
        if block is None:
            span = weight.abs().amax(1, keepdim=True) if rows else weight.abs().amax()
            scale = span / 448.0
            wide = scale.expand(outputs, inputs)
        else:
            scale = torch.zeros(-(-outputs // block), -(-inputs // block))
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    part = weight[block * row :, block * column :][:block, :block]
                    scale[row, column] = part.abs().max() / 448.0
            wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            wide = wide[:outputs, :inputs]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        name = ".weight_scale" if block is None else ".weight_scale_inv"
        tensors = {".weight": codes, name: scale.clone()}
        if block is None and not rows:
            tensors[".input_scale"] = torch.tensor(0.5)
        return Stored(tensors, codes.float() * wide)

    config: dict[str, Any] = {"quant_method": method, "activation_scheme": "dynamic"}
    if block is not None:
        config |= {"fmt": "e4m3", "weight_block_size": [block, block]}
    return Writer(config, store)


def modelopt_fp8() -> Writer:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return Writer(config, fp8().store)


def fp4_codes(values: Tensor) -> Tensor:
    """The nearest of e2m1."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    return (values[..., None] - table).abs().argmin(-1)


def modelopt_nvfp4() -> Writer:
    def store(weight: Tensor) -> Stored:
        outputs, inputs = weight.shape
        whole = weight.abs().max() / (448.0 * 6.0)
        groups = weight.view(outputs, -1, 16)
        scale = (groups.abs().amax(-1) / 6.0 / whole).to(torch.float8_e4m3fn)
        wide = (scale.float() * whole)[..., None]
        codes = fp4_codes(groups / wide.clamp_min(1e-12)).view(outputs, inputs)
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
        numbers = table[codes] * wide.expand_as(groups).reshape(outputs, inputs)
        both = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        tensors = {".weight": both, ".weight_scale": scale, ".weight_scale_2": whole.clone()}
        return Stored(tensors | {".input_scale": torch.tensor(0.25)}, numbers)

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    return Writer(config, store)


def compressed(bits: int, size: int, *, symmetric: bool = True, ordered: bool = False) -> Writer:
    """pack-quantized."""

    def store(weight: Tensor) -> Stored:
        outputs, inputs = weight.shape
        groups = mixed_groups(inputs, size) if ordered else in_groups(inputs, size)
        codes, scales, zeros, numbers = rounded(weight, bits, groups, symmetric, torch.bfloat16)
        tensors = {
            ".weight_packed": packed(codes, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([outputs, inputs]),
        }
        if ordered:
            tensors[".weight_g_idx"] = groups.int()
        if not symmetric:
            tensors[".weight_zero_point"] = packed(zeros.t().contiguous(), bits).t().contiguous()
        return Stored(tensors, numbers)

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "channel" if size < 0 else "group", "group_size": None if size < 0 else size,
        "actorder": "group" if ordered else None,
    }  # fmt: skip
    return Writer(compressed_config("pack-quantized", weights), store)


def compressed_config(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, **more,
    }  # fmt: skip


WRITERS: dict[str, Writer] = {
    "gptq-4": gptq(4, 32),
    "gptq-4-symmetric": gptq(4, 128, symmetric=True),
    "gptq-4-whole-rows": gptq(4, -1),
    "gptq-4-ordered": gptq(4, 32, ordered=True),
    "gptq-8": gptq(8, 64),
    "gptq-8-ordered": gptq(8, 32, ordered=True, symmetric=True),
    "gptq-v2": gptq(4, 64, version=2),
    "awq": awq(64),
    "fp8-block": fp8(128),
    "fp8-tensor": fp8(),
    "fp8-rows": fp8(rows=True, method="fbgemm_fp8"),
    "modelopt-fp8": modelopt_fp8(),
    "modelopt-nvfp4": modelopt_nvfp4(),
    "packed-4": compressed(4, 32),
    "packed-4-asymmetric": compressed(4, 64, symmetric=False),
    "packed-4-ordered": compressed(4, 32, ordered=True),
    "packed-8": compressed(8, 64),
    "packed-8-rows": compressed(8, -1),
}
"""One of each format that is read, by its layout."""


class Twins(NamedTuple):
    quantized: Path
    plain: Path
    """The same numbers, in fp32."""


def write_twins(
    source: Path, folder: Path, writer: Writer, plain: Callable[[str], bool] = lambda name: False
) -> Twins:
    """Quantize the linear layers of a folder but the LM head, and those that ``plain`` names."""
    weights = load_file(source / "model.safetensors")
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if "_proj.weight" not in name or plain(module):
            stored[name] = numbers[name] = tensor
            continue
        made = writer.store(tensor.float())
        stored |= {module + kind: each.contiguous() for kind, each in made.tensors.items()}
        numbers[name] = made.weight.contiguous()
    twins = Twins(folder / "quantized", folder / "plain")
    for path, tensors in zip(twins, (stored, numbers), strict=True):
        shutil.copytree(source, path)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    set_config(twins.quantized, quantization_config=writer.config)
    return twins


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
