"""What rules a model out before memory is taken: a worker at its start and ``penstock plan`` tell
it in the same words.

torch is imported where the settings or the files ask for it alone.
"""

from __future__ import annotations

from penstock.kernels.gpu.device_facts import facts_of
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import read_machine
from penstock.protocol.config.model_dtype import ITEM_BYTES, computed_type
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.pooling import read_pooling
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.kept_model import check_held, check_kept
from penstock.services.worker.kv_cache_checks import check_for_gpu, check_kernels
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.rank_choice import check_division
from penstock.services.worker.speculation.draft_shape import read_draft_shape


def check_all(config: Config, info: ModelInfo, capability: tuple[int, int] | None) -> None:
    """For a plan, which reads no weights. capability: see ``check_settings``. Raises
    ``BadModelFolder`` and ``ConfigError``, but for encoders, of which there is no plan."""
    if read_pooling(info, config.model).encoder:
        return
    check_files(config, info)
    dtype = type_name(config.model.dtype, info, on_cpu=capability is None)
    check_settings(config, info, dtype, capability)
    check_model(config, info, dtype)
    if capability is not None and config.cache.kv_cache_dtype != "auto":
        _check_attention(config, info, dtype, capability)


def _check_attention(
    config: Config, info: ModelInfo, dtype: str, capability: tuple[int, int]
) -> None:
    """What a worker knows when the model is loaded: whether our kernels attend."""
    import torch

    from penstock.services.worker.loaded_model import why_plain

    model = choose_model(info, config).specification
    if model is not None:
        shared = facts_of(capability).shared_bytes
        plain = why_plain(model, ITEM_BYTES[dtype], config.cache.block_size, shared)
        check_kernels(config, torch.device("cuda"), plain)


def check_files(config: Config, info: ModelInfo) -> None:
    """What the folder shows without torch. Raises ``BadModelFolder`` and ``ConfigError``."""
    check_kept(config, info)
    check_held(config, info)
    if config.device.device == "null":
        return
    check_division(config, info)
    if config.loading.load_format != "dummy" and not config.loading.hold_weights:
        Checkpoint(info.folder)


def type_name(name: str, info: ModelInfo, *, on_cpu: bool) -> str:
    """What the model is computed in, as torch names it. name: of ``--dtype``; ``auto`` is what
    ``computed_type`` says. Raises ``BadModelFolder`` and ``ConfigError``."""
    if name == "auto":
        return computed_type(info, read_machine() if on_cpu else None)
    if on_cpu and name == "float16":
        raise ConfigError("--dtype float16: the CPU computes in bfloat16 or float32")
    return name


def check_settings(
    config: Config, info: ModelInfo, dtype: str, capability: tuple[int, int] | None
) -> None:
    """What the settings ask of the model and the device. dtype: see ``type_name``; capability: of
    the GPU, ``None``: a CPU computes. Raises ``BadModelFolder`` and ``ConfigError``."""
    on_cpu, pooling = capability is None, read_pooling(info, config.model)
    if config.model.quantization == "fp8" and on_cpu:
        raise ConfigError(
            "--quantization fp8: CPUs do not multiply FP8; int8 takes as much memory there"
        )
    if capability is not None:
        check_for_gpu(config, capability)
    if config.loading.lora or config.launch.lora_dirs:
        from penstock.services.worker.adapters.loading import check_adapters

        check_adapters(config, info, pooling, "cpu" if on_cpu else "cuda")
    if config.device.deterministic:
        from penstock.services.worker.determinism import check_deterministic

        check_deterministic(config, info, pooling, "cpu" if on_cpu else "cuda", dtype)
    if pooling.generates:
        read_draft_shape(config, info, [], on_cpu=on_cpu)


def check_model(config: Config, info: ModelInfo, dtype: str) -> None:
    """Whether the code that is to compute the model takes its files, which a worker finds out when
    it loads them. Raises ``BadModelFolder``."""
    choice = choose_model(info, config)
    if choice.specification is not None and config.loading.load_format == "dummy":
        return
    import torch

    from penstock.services.worker.model_weights import check_loadable

    check_loadable(config, info, getattr(torch, dtype), choice)
