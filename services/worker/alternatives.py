"""What else ``penstock plan`` tries: settings that leave more room for KV memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from penstock.protocol.config import Config
from penstock.services.worker.kv_cache_checks import refused_on_gpus

if TYPE_CHECKING:
    from penstock.services.worker.plan import Planner

_ROUNDED: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
_TRIED_TOKENS, _TRIED_SEQS, _TRIED_SHARE = (4096, 2048, 1024, 512), (128, 64, 16, 4), 0.95


def alternatives(planner: Planner, config: Config) -> Iterator[tuple[str, Config]]:
    """Settings that need less memory or may use more, one flag changed at a time."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    if planner.type_name(config) == "float32":
        yield "--dtype bfloat16", replace(config, model=replace(model, dtype="bfloat16"))
    if planner.may_quantize(config):
        for kind in _ROUNDED:
            yield (
                f"--quantization {kind}",
                replace(config, model=replace(model, quantization=kind)),
            )
    if cache.kv_kind == "auto" and (planner.device.is_cpu or not refused_on_gpus(config)):
        yield "--kv-cache-dtype int8", replace(config, cache=replace(cache, kv_cache_dtype="int8"))
    if not planner.device.is_cpu and cache.gpu_memory_utilization < _TRIED_SHARE:
        changed = replace(cache, gpu_memory_utilization=_TRIED_SHARE)
        yield f"--gpu-memory-utilization {_TRIED_SHARE:g}", replace(config, cache=changed)
    tokens, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    for fewer in _TRIED_TOKENS:
        if max(seqs, fewer) < tokens and fewer <= tokens // 2:
            changed_steps = replace(scheduler, max_num_batched_tokens=fewer)
            yield f"--max-num-batched-tokens {fewer}", replace(config, scheduler=changed_steps)
            break
    for fewer in _TRIED_SEQS:
        if fewer <= seqs // 2:
            changed_steps = replace(scheduler, max_num_seqs=fewer)
            yield f"--max-num-seqs {fewer}", replace(config, scheduler=changed_steps)
            break
