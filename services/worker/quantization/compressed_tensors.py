"""compressed-tensors: groups of modules, each with a scheme for its weights.

A scheme's weights have bits, a type, and a strategy: a scale for the tensor, each channel (row),
group or block. ``format`` says how they are stored. Activations that a scheme quantizes may be; the
cache is not.
"""

from __future__ import annotations

from penstock.services.worker.quantization.config import QuantizationConfig
from penstock.services.worker.quantization.format import Format
from penstock.services.worker.quantization.fp4 import MXFP4_GROUP, NVFP4_GROUP, Fp4Format
from penstock.services.worker.quantization.fp8 import Fp8Format
from penstock.services.worker.quantization.integers import Int8Format
from penstock.services.worker.quantization.packed_integers import PackQuantized
from penstock.services.worker.quantization.quantization import (
    FormatGroup,
    Pattern,
    Quantization,
    is_class,
)

_READ = (
    "float-quantized, int-quantized, naive-quantized, pack-quantized, nvfp4-pack-quantized and "
    "mxfp4-pack-quantized"
)
_REGEX = "re:"
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


def compressed_tensors(config: QuantizationConfig) -> Quantization:
    """Raises ``BadModelFolder`` for what is not read."""
    sparsity = config.within("sparsity_config", config.table("sparsity_config"))
    if (sparse := sparsity.text("format", "dense")) != "dense":
        raise config.error(f"sparsity_config {sparse!r}: sparse weights are not read")
    if config.table("transform_config").get("config_groups"):
        raise config.error("transform_config: weights that go with transforms are not read")
    found: list[tuple[bool, FormatGroup]] = []
    for name, values in config.table("config_groups").items():
        group = config.within(f"config_groups.{name}", values)
        format = _format(group, group.text("format", config.text("format", "")))
        for target in group.names("targets"):
            if is_class(target):
                found.append((True, FormatGroup((), format)))
            else:
                found.append((False, FormatGroup((_pattern(config, target),), format)))
    if not found:
        raise config.error("config_groups has no targets: nothing says what is quantized")
    # Names ahead of what names a class of modules.
    groups = tuple(group for _, group in sorted(found, key=lambda each: each[0]))
    ignored = tuple(_pattern(config, name) for name in config.names("ignore"))
    return Quantization("compressed-tensors", groups, ignored)


def _pattern(config: QuantizationConfig, text: str) -> Pattern:
    if text.startswith(_REGEX):
        return config.regex(text.removeprefix(_REGEX))
    return Pattern(text)


def _format(group: QuantizationConfig, stored: str) -> Format | None:
    """Of a group's weights; ``None`` where it quantizes activations alone."""
    if not group.table("weights"):
        return None
    weights = group.within("weights", group.table("weights"))
    kind, symmetric = weights.text("type", "int"), weights.flag("symmetric", True)
    bits = weights.choice("num_bits", (4, 8), 8)
    strategy = _strategy(weights)
    if strategy not in _STRATEGIES:
        raise weights.error(f"strategy {strategy!r}: read are {', '.join(_STRATEGIES)}")
    size = weights.group("group_size") if strategy in ("group", "tensor_group") else -1
    ordered = weights.has("actorder") and weights.text_or_flag("actorder") in ("group", "dynamic")
    activations = bool(group.table("input_activations"))
    match stored:
        case "pack-quantized" if kind == "int" and strategy in ("channel", "group"):
            return PackQuantized(bits, size, symmetric, ordered)
        case "int-quantized" | "naive-quantized" if kind == "int" and bits == 8:
            if strategy in ("tensor", "channel", "group") and not ordered:
                return Int8Format(size, symmetric, activations)
        case "float-quantized" | "naive-quantized" if kind == "float" and bits == 8 and symmetric:
            if strategy in ("tensor", "channel"):
                return Fp8Format(activations=activations)
            if strategy == "block":
                block = weights.block("block_structure")
                return Fp8Format(block, activations=activations)
        case "nvfp4-pack-quantized" if kind == "float" and bits == 4 and size == NVFP4_GROUP:
            return Fp4Format(size, whole=".weight_global_scale", divided=True)
        case "mxfp4-pack-quantized" if kind == "float" and bits == 4 and size == MXFP4_GROUP:
            return Fp4Format(size)
    raise weights.error(
        f"{bits}-bit {kind} weights with a scale for each {strategy}"
        f"{'' if symmetric else ', asymmetric'}, stored as {stored or 'nothing'}, are not read; "
        f"read are {_READ} of compressed-tensors' own presets"
    )


def _strategy(weights: QuantizationConfig) -> str:
    """As the library derives it where it is left out."""
    if weights.has("strategy"):
        return weights.text("strategy", "")
    if weights.has("group_size"):
        return "channel" if weights.group("group_size") == -1 else "group"
    return "block" if weights.has("block_structure") else "tensor"
