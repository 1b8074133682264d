"""Values that were left out, derived from the model and the machine, each with its reason.

Only what stands at its default is replaced; what a file, the environment or a flag says is never
touched. The worker may still lower ``max_model_len`` when it has measured its KV memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.protocol.config.fields import Config
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.model_dtype import ITEM_BYTES, computed_type, reason_for
from penstock.protocol.config.sources import Provenance, Source
from penstock.protocol.model_info import ModelInfo

CUDA_MAX_NUM_SEQS = 256
CUDA_MAX_NUM_BATCHED_TOKENS = 8192
CORES_A_FRONTEND = 4
MAX_FRONTENDS = 4
WAITING_KV = 8
"""Times that what waits may fill KV memory: prompts are kept by several processes meanwhile."""
WAITING_TOKENS = 2**20


def waiting_tokens_limit(given: int | None, kv_tokens: int) -> int:
    """Prompt tokens that may wait for engines whose KV memory holds ``kv_tokens``."""
    return given or max(WAITING_TOKENS, WAITING_KV * kv_tokens)


class _Deriver:
    def __init__(self, config: Config, sources: Provenance) -> None:
        self.config = config
        self.sources = dict(sources)

    def set(self, group: str, name: str, value: Any, reason: str) -> None:
        """Give a field that was left out its value."""
        if self.sources[name].origin != "default":
            return
        changed = msgspec.structs.replace(getattr(self.config, group), **{name: value})
        self.config = msgspec.structs.replace(self.config, **{group: changed})
        self.sources[name] = Source("derived", reason)


def derive(
    config: Config, sources: Provenance, machine: Machine, info: ModelInfo | None
) -> tuple[Config, Provenance]:
    """Fill what was left out. ``info``: the model, where the command knows it."""
    found = _Deriver(config, sources)
    steps: tuple[Callable[[_Deriver, Machine, ModelInfo | None], None], ...] = (
        _device,
        _model,
        _sizes,
        _processes,
    )
    for step in steps:
        step(found, machine, info)
    return found.config, found.sources


def _device(found: _Deriver, machine: Machine, info: ModelInfo | None) -> None:
    if found.config.device.device == "auto":
        if machine.gpus:
            found.set("device", "device", "cuda", f"the machine has {machine.gpus} CUDA device(s)")
        else:
            found.set("device", "device", "cpu", "the machine has no CUDA device")
    if found.config.device.device == "cpu":
        # The number itself is found by the worker, which times steps of the model.
        reason = f"what the worker measures to be fastest on {machine.physical_cores} cores"
        found.set("device", "threads", None, reason)


def _model(found: _Deriver, machine: Machine, info: ModelInfo | None) -> None:
    if info is None:
        return
    name = info.folder.resolve().name
    found.set("model", "served_model_name", [name], "the model folder's name")
    # The value itself is found by the worker, which measures the KV memory.
    found.set(
        "model",
        "max_model_len",
        None,
        f"{info.max_model_len} (max_position_embeddings in config.json), less if KV memory is",
    )
    dtype = info.dtype.removeprefix("torch.")
    if found.config.model.dtype == "auto" and dtype in ITEM_BYTES:
        on_cpu = found.config.device.device == "cpu"
        chosen = computed_type(info, machine if on_cpu else None)
        found.set("model", "dtype", chosen, reason_for(chosen, dtype))


def _sizes(found: _Deriver, machine: Machine, info: ModelInfo | None) -> None:
    if found.config.device.device != "cuda":
        return
    reason = "a CUDA device computes large steps efficiently"
    tokens = max(CUDA_MAX_NUM_BATCHED_TOKENS, found.config.scheduler.max_num_seqs)
    found.set("scheduler", "max_num_batched_tokens", tokens, reason)
    seqs = min(CUDA_MAX_NUM_SEQS, found.config.scheduler.max_num_batched_tokens)
    found.set("scheduler", "max_num_seqs", seqs, reason)


def _processes(found: _Deriver, machine: Machine, info: ModelInfo | None) -> None:
    launch = found.config.launch
    if launch.prefill_engines and launch.decode_engines:
        engines = launch.prefill_engines + launch.decode_engines
        reason = "--prefill-engines and --decode-engines together"
        found.set("launch", "data_parallel_size", engines, reason)
    count = max(1, min(MAX_FRONTENDS, machine.cores // CORES_A_FRONTEND))
    reason = f"one for each {CORES_A_FRONTEND} of {machine.cores} cores, at most {MAX_FRONTENDS}"
    found.set("launch", "frontends", count, reason)
    found.set("launch", "tokenizers", count, reason)
