"""Whether a model can be computed as ``--deterministic`` asks."""

from __future__ import annotations

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.determinism import contradictions_of_determinism
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.pooling import Pooling
from penstock.services.worker.loaded_model import AttentionAlone
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.models.dense import dense_config
from penstock.services.worker.models.dense_form import DenseModel
from penstock.services.worker.models.specification import ModelSpecification, for_length
from penstock.services.worker.quantization.reading import read_quantization

_REMEDY = "leave --deterministic out"


def check_deterministic(
    config: Config, info: ModelInfo, pooling: Pooling, device: str, dtype: str
) -> None:
    """Look at the model's files before its weights are read, which may take minutes.

    device: ``cpu`` or ``cuda``; dtype: as torch names it. Raises ``ConfigError`` where a row's bits
    would depend on what else a step has, and ``BadModelFolder``.
    """
    if config.device.deterministic and (reason := _why_not(config, info, pooling, device, dtype)):
        raise ConfigError(f"--deterministic: {reason}")


def repeats(config: Config, info: ModelInfo, pooling: Pooling, device: str, dtype: str) -> bool:
    """Whether the answer of a seed has the same bits whatever else a step computes: on a CPU where
    ``--deterministic`` would change nothing, on a GPU with it."""
    if config.device.deterministic or device != "cpu":
        return config.device.deterministic
    asked = msgspec.structs.replace(config.device, deterministic=True)
    config = msgspec.structs.replace(config, device=asked)
    contradicted = any(contradictions_of_determinism(config))
    return not contradicted and not _why_not(config, info, pooling, device, dtype)


def check_deterministic_kernels(config: Config, kernels: DenseModel | AttentionAlone | str) -> None:
    """On a GPU. Raises ``ConfigError`` where Penstock's kernels turned out not to compute the
    model."""
    if not config.device.deterministic or isinstance(kernels, DenseModel):
        return
    reason = kernels if isinstance(kernels, str) else kernels.reason
    raise ConfigError(f"--deterministic: {_not_by_kernels(reason)}")


def _why_not(config: Config, info: ModelInfo, pooling: Pooling, device: str, dtype: str) -> str:
    """With the way out; empty: it can be."""
    if pooling.tasks or not pooling.generates:
        tasks = ", ".join(pooling.tasks) or "no generation"
        return (
            f"the model is for {tasks} ({pooling.reason}), and answers repeat for models that "
            f"generate alone; {_REMEDY}"
        )
    quantization = read_quantization(info, config.model.quantization)
    # A GGUF file may have plain tensors alone.
    if quantization is not None and (quantization.groups or quantization.named):
        return (
            f"the weights in {info.folder} are quantized ({quantization.method}), and plain ones "
            f"are needed; give a checkpoint in bfloat16 or float32, or {_REMEDY}"
        )
    choice = choose_model(info, config)
    if choice.specification is None:
        refusal = f" because its own family refuses it ({choice.refusal})" * bool(choice.refusal)
        return (
            f"transformers' code computes {info.architecture}{refusal}, and the order of its sums "
            "is not known; give a model of one of Penstock's own families (docs/models.md), or "
            f"{_REMEDY}"
        )
    if device == "cpu":
        if dtype == "float32":
            return ""
        return (
            f"on a CPU the order of sums is fixed in float32 alone, and --dtype "
            f"{config.model.dtype} is {dtype} here; give --dtype float32, or {_REMEDY}"
        )
    longest = config.model.max_model_len or info.max_model_len
    return _why_not_on_gpu(for_length(choice.specification, longest))


def _why_not_on_gpu(model: ModelSpecification) -> str:
    form = dense_config(model)
    if isinstance(form, str):
        return _not_by_kernels(f"they lack {form}")
    from penstock.services.worker.gpu.fixed_decoder import why_not_fixed

    if reason := why_not_fixed(form):
        return f"{reason}, for which no kernel has a fixed order of sums; {_REMEDY}"
    return ""


def _not_by_kernels(reason: str) -> str:
    return (
        "on a GPU Penstock's own kernels have to compute the model's layers, and here they do "
        f"not: {reason}; give another model, or {_REMEDY}"
    )
