"""What ``--deterministic`` does not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.fields import Config

_FLAG = "--deterministic"


def contradictions_of_determinism(config: Config) -> Iterator[str]:
    """Of settings alone; what the model must be is told by the worker."""
    if not config.device.deterministic:
        return
    model, device = config.model, config.device.device
    if device == "null":
        yield f"{_FLAG} has no meaning with --device null, which computes nothing"
    if model.model_impl == "transformers":
        yield f"{_FLAG} with --model-impl transformers: only families of our own have one order"
    if model.task not in ("auto", "generate") or model.pooling != "auto":
        yield f"{_FLAG} with --task or --pooling: it is for models that generate alone"
    if device == "cpu" and model.dtype in ("bfloat16", "float16"):
        yield (
            f"{_FLAG} with --device cpu and --dtype {model.dtype}: on a CPU products have one "
            "order in float32 alone"
        )
    if model.quantization != "none":
        yield f"{_FLAG} with --quantization {model.quantization}: it is for plain weights"
    if config.cache.kv_cache_dtype != "auto":
        yield (
            f"{_FLAG} with --kv-cache-dtype {config.cache.kv_cache_dtype}: it is for KV memory of "
            "the model's type"
        )
    if config.cluster.world_size > 1:
        yield (
            f"{_FLAG} with a model divided among {config.cluster.world_size} devices: it is for "
            "models on one; --data-parallel-size uses more"
        )
    if config.loading.lora or config.launch.lora_dirs:
        flag = "--lora" if config.loading.lora else "--lora-dirs"
        yield f"{_FLAG} with {flag}: adapters have no order of their own yet"
    if config.speculation.drafts:
        yield (
            f"{_FLAG} with --speculative {config.speculation.speculative}: drafts have not been "
            "checked with it; use --speculative off"
        )
