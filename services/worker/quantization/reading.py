"""Reads ``quantization_config``: from a folder's words to a ``Quantization``.

A method that is not implemented is refused with the nearest that is; so is a setting.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_text
from penstock.services.worker.gguf_file import gguf_file
from penstock.services.worker.quantization.compressed_tensors import compressed_tensors
from penstock.services.worker.quantization.config import QuantizationConfig
from penstock.services.worker.quantization.fp4 import NVFP4_GROUP, Fp4Format
from penstock.services.worker.quantization.fp8 import Fp8Format
from penstock.services.worker.quantization.gguf import gguf_quantization
from penstock.services.worker.quantization.online import OnlineFormat
from penstock.services.worker.quantization.packed_integers import AwqFormat, GptqFormat
from penstock.services.worker.quantization.quantization import (
    HEAD,
    FormatGroup,
    Pattern,
    Quantization,
    all_but,
)

_KINDS: dict[str, Literal["int8", "int4", "fp8"]] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
_TWICE = (
    "the weights are quantized already ({}), and --quantization {} quantizes plain ones: leave it "
    "out, or give the folder that this one was made from"
)
_MODELOPT_FILE = "hf_quant_config.json"
_PLAIN = "use the checkpoint in bfloat16 and --quantization"
NEAREST = {
    "aqlm": f"{_PLAIN} int4",
    "auto-round": "export the model in the format auto_gptq or auto_awq, which are read",
    "bitsandbytes": f"{_PLAIN} int4 (for load_in_4bit) or int8",
    "bitnet": f"{_PLAIN} int4",
    "eetq": f"{_PLAIN} int8",
    "fp_quant": f"{_PLAIN} int4",
    "gguf": "leave quantization_config out: a GGUF file beside config.json is read for what it is",
    "higgs": f"{_PLAIN} int4",
    "hqq": f"{_PLAIN} int4",
    "mxfp4": "that is the format of mixtures of experts, which have no quantized layers here yet; "
    "dense layers in MXFP4 are read from compressed-tensors",
    "quanto": f"{_PLAIN} int8 or int4",
    "quark": "export the model as compressed-tensors, fp8 or awq",
    "spqr": f"{_PLAIN} int4",
    "torchao": f"{_PLAIN} int8, int4 or fp8",
    "vptq": f"{_PLAIN} int4",
}
"""What works instead of methods that do not."""


def read_quantization(info: ModelInfo, online: str = "none") -> Quantization | None:
    """How the folder's weights are quantized, or shall be while they are read; ``None``: plain.
    online: as ``--quantization`` says.

    Raises ``BadModelFolder`` for a method or setting that is not implemented, and for a folder that
    is to be quantized and is already.
    """
    values = _values(info)
    path = gguf_file(info.folder) if values is None and not _safetensors(info) else None
    if path is not None:
        if online != "none":
            raise BadModelFolder(f"{path}: {_TWICE.format('GGUF', online)}")
        return gguf_quantization(path, info)
    if values is None:
        return None if online == "none" else online_quantization(online)
    config = QuantizationConfig(values, info.folder / "config.json")
    if online != "none":
        raise config.error(_TWICE.format(config.method, online))
    read = _METHODS.get(config.method)
    if read is not None:
        return read(config)
    if (nearest := NEAREST.get(config.method)) is not None:
        raise config.error(f"quant_method {config.method} is not supported: {nearest}")
    raise config.error(
        f"quant_method {config.method!r} is not known; read are {', '.join(sorted(_METHODS))}; or "
        f"{_PLAIN} int8, int4 or fp8"
    )


def _safetensors(info: ModelInfo) -> bool:
    return any(info.folder.glob("*.safetensors"))


def _values(info: ModelInfo) -> dict[str, Any] | None:
    """``quantization_config``, or what ModelOpt keeps in a file of its own."""
    found: Any = info.config.get("quantization_config") or info.config.get("compression_config")
    if found is not None:
        return found if isinstance(found, dict) else {"quant_method": found}
    path = info.folder / _MODELOPT_FILE
    if not path.exists():
        return None
    try:
        inner = json.loads(read_text(path))["quantization"]
        return {**inner, "quant_method": "modelopt"}
    except (ValueError, TypeError, KeyError, RecursionError) as failure:
        raise BadModelFolder(f"{path}: no object with `quantization`: {failure}") from None


def online_quantization(kind: str) -> Quantization:
    """``int8``, ``int4`` or ``fp8`` of every linear layer; the LM head in int8, the nearest to it:
    a step reads it as it reads a layer."""
    layers = OnlineFormat(_KINDS[kind])
    head = FormatGroup((Pattern(HEAD),), OnlineFormat("int8"))
    return Quantization(kind, (head, FormatGroup((), layers)), online=True)


def _fp8(config: QuantizationConfig) -> Quantization:
    block = config.block("weight_block_size")
    if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise config.error("fmt: e4m3 alone is read")
    scale = ".weight_scale" if block is None else ".weight_scale_inv"
    return all_but("fp8", Fp8Format(block, scale), _parts(config))


def _fbgemm_fp8(config: QuantizationConfig) -> Quantization:
    return all_but("fbgemm_fp8", Fp8Format(), _parts(config))


def _parts(config: QuantizationConfig) -> tuple[Pattern, ...]:
    """Modules that stay plain: transformers looks for their names in those of layers."""
    names = config.names("modules_to_not_convert") + config.names("ignored_layers")
    return tuple(Pattern(name, "part") for name in (HEAD, *names))


def _gptq(config: QuantizationConfig) -> Quantization:
    bits, group = config.choice("bits", (4, 8)), config.group("group_size")
    version = config.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise config.error(f"checkpoint_format {version!r}: gptq and gptq_v2 are read")
    ordered = config.flag("desc_act", False)
    first, symmetric = 0 if version == "gptq_v2" else 1, config.flag("sym", True)
    format = GptqFormat(bits, group, ordered, first, symmetric)
    ignored = () if config.flag("lm_head", False) else (Pattern(HEAD),)
    only = config.nested_names("modules_in_block_to_quantize")
    targets = tuple(Pattern(name) for name in only)
    rules = _dynamic(config, format)
    return Quantization("gptq", (*rules, FormatGroup(targets, format)), ignored)


def _dynamic(config: QuantizationConfig, default: GptqFormat) -> list[FormatGroup]:
    """GPTQModel's rules for some modules: ``-:`` leaves them plain, ``+:`` or nothing changes
    bits and groups."""
    rules = []
    for rule, changes in config.table("dynamic").items():
        text = rule[2:] if rule[:2] in ("+:", "-:") else rule
        target = config.regex(text)
        if rule.startswith("-:"):
            rules.append(FormatGroup((target,), None))
            continue
        inner = config.within("dynamic", changes)
        bits = inner.choice("bits", (4, 8), default.bits)
        group = inner.group("group_size", default.group)
        ordered = inner.flag("desc_act", default.ordered)
        symmetric = inner.flag("sym", default.symmetric)
        format = GptqFormat(bits, group, ordered, default.first_zero, symmetric)
        rules.append(FormatGroup((target,), format))
    return rules


def _awq(config: QuantizationConfig) -> Quantization:
    version = config.text("version", "gemm").lower()
    if version != "gemm":
        raise config.error(f"version {version!r}: AWQ's gemm alone is read; convert it to that")
    bits = config.choice("bits" if config.has("bits") else "w_bit", (4,))
    group = config.group("group_size" if config.has("group_size") else "q_group_size")
    return all_but("awq", AwqFormat(bits, group), _parts(config))


def _modelopt(config: QuantizationConfig) -> Quantization:
    algorithm = config.text("quant_algo", "").upper()
    ignored = tuple(
        Pattern(name, "wildcard" if "*" in name else "part")
        for name in config.names("ignore") + config.names("exclude_modules")
    )
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return all_but("modelopt", Fp8Format(), ignored)
    if algorithm == "NVFP4":
        format = Fp4Format(NVFP4_GROUP, ".weight", ".weight_scale_2")
        return all_but("modelopt", format, ignored)
    raise config.error(f"quant_algo {algorithm!r}: ModelOpt's FP8 and NVFP4 are read")


_METHODS: dict[str, Callable[[QuantizationConfig], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": _fbgemm_fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
