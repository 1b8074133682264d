"""What a loaded model's largest step takes of its device: measured on a GPU, counted on a CPU."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import free_host_bytes
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.device_memory import CudaMemory, DeviceMemory, measure_step
from penstock.services.worker.gpu.kernel_choice import not_hopper
from penstock.services.worker.gpu.static_memory import (
    ExecutorSizes,
    of_profile,
    static_parts,
    widens_keys,
)
from penstock.services.worker.loaded_model import AttentionAlone, LoadedModel
from penstock.services.worker.memory import EXTRA_BLOCKS, blocks_for
from penstock.services.worker.memory_account import (
    MemoryAccount,
    MemoryPart,
    dtype_name,
    weights_part,
)
from penstock.services.worker.memory_plan import cpu_account, cuda_account, with_kv
from penstock.services.worker.model_shape import shape_of, shape_of_others
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense_form import DenseModel
from penstock.services.worker.placement import placement
from penstock.services.worker.plain_memory import later_plain_parts, plain_parts, rotary_tables
from penstock.services.worker.quantization.reading import read_quantization
from penstock.services.worker.speculation.draft_shape import read_draft_shape
from penstock.services.worker.step_profile import run_all_rows, run_once

CPU_PROFILE_TOKENS = 512
"""On the CPU a step is run for what it leaves behind in the process: a short one does."""


class ModelMemory:
    """The memory of one model, under one configuration, beside KV memory."""

    def __init__(
        self,
        subject: LoadedModel,
        config: Config,
        info: ModelInfo,
    ) -> None:
        model = subject.model
        self._subject, self._model, self._config = subject, model, config
        self._item = model.dtype.itemsize
        self._quantization = read_quantization(info, config.model.quantization)
        self.block_bytes = subject.block_bytes(config.cache.block_size)
        on_cpu = model.device.type == "cpu"
        self._draft = read_draft_shape(config, info, subject.groups, on_cpu=on_cpu)
        if self._draft is not None:
            self.block_bytes += self._draft.block_bytes(config.cache.block_size, self._item)
        if isinstance(model, Decoder):
            self._shape = shape_of(model.specification)
        else:
            self._shape = shape_of_others(info, model.num_parameters, model.caches)
        self._full = EngineSizes(
            num_blocks=0,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=min(config.model.max_model_len or info.max_model_len, info.max_model_len),
            vocab_size=info.vocab_size,
            groups=subject.groups,
        )

    def counted(self) -> MemoryAccount:
        """On a CPU, after a step."""
        tokens = min(self._tokens(), CPU_PROFILE_TOKENS)
        run_once(self._subject.executor(self._profiled(tokens, 1)), tokens)
        shape, model = self._shape, self._model
        packed = shape.parameters + (shape.head_parameters if model.packed else 0)
        held = packed * self._item
        if isinstance(model, Decoder) and model.quantized:
            held = model.weight_bytes
        parts, free = [self._weights(held), *self._adapters()], free_host_bytes()
        if (mapped := self._subject.held_bytes) and model.packed:
            parts.append(MemoryPart("held weights", mapped, "as loaded, for the next worker"))
        if self._draft is not None:  # which is not loaded yet
            parts.append(self._draft.part(self._item, dtype_name(model.dtype)))
            free -= parts[-1].num_bytes
        step = plain_parts(shape, self._full, self._item, "cpu")
        return cpu_account(self._config, free, parts, step, self.block_bytes)

    def _adapters(self) -> list[MemoryPart]:
        """Those that are loaded so far."""
        held = self._subject.adapters
        if held is None:
            return []
        return [MemoryPart("adapters", held.num_bytes, f"{len(held.folders)} loaded")]

    def measured(self, memory: DeviceMemory) -> MemoryAccount:
        """On a device with a memory of its own, by a step of the largest size."""
        tokens, kernels = self._tokens(), self._subject.kernels
        capacity = self._profiled(tokens, self._full.max_num_seqs)

        def run() -> int:
            executor = self._subject.executor(capacity)
            run_once(executor, tokens)
            if not isinstance(kernels, DenseModel):  # else all was taken when it was made
                run_all_rows(executor, tokens)
            return (capacity.num_blocks + EXTRA_BLOCKS) * self.block_bytes

        found = measure_step(memory, run)
        adapters = self._adapters()
        held = self._subject.adapters
        # Mapped weights are in the device's use, and not the allocator's; however many map them,
        # they are there once.
        mapped = self._subject.held_bytes
        weights = self._weights(found.weights + mapped - (0 if held is None else held.num_taken))
        if self._subject.compressed:
            weights = replace(weights, note=f"{weights.note}, and compressed")
        if isinstance(kernels, str):
            rest = self._full.max_model_len - tokens
            step = [MemoryPart("step", found.step, f"measured with {tokens:,} rows")]
            step += later_plain_parts(self._shape, self._full, rest, self._item, "cuda")
        else:
            step = self._of_kernels(kernels, capacity, found.step)
        device, _ = placement(self._model.device, self._model.dtype)
        parts = [weights, *adapters, *step]
        return cuda_account(
            self._config, device, found.total, parts, found.outside - mapped, self.block_bytes
        )

    def _of_kernels(
        self, kernels: DenseModel | AttentionAlone, profiled: EngineSizes, measured: int
    ) -> list[MemoryPart]:
        """The parts of what the kernels' executor takes, of which a profile with fewer positions
        has measured a total."""
        alone = isinstance(kernels, AttentionAlone)
        count = multiprocessors()
        widens = widens_keys(
            kernels.config, self._config.cache.kv_kind, self._item, self._full.block_size,
            hopper=not not_hopper(),
        )  # fmt: skip
        profile = ExecutorSizes(kernels.config, profiled, self._item, alone, count, widens=widens)
        taken = sum(part.num_bytes for part in static_parts(profile))
        adapted = self._subject.adapters is not None
        sizes = ExecutorSizes(kernels.config, self._full, self._item, alone, count, adapted, widens)
        parts = of_profile(sizes, max(0, measured - taken))
        if alone:  # the model's own tables stand beside the kernels' ones
            later = self._full.max_model_len - profiled.max_model_len
            parts.append(rotary_tables(self._shape, later))
        return parts

    def _tokens(self) -> int:
        return min(self._full.max_num_batched_tokens, self._full.max_model_len)

    def _weights(self, num_bytes: int) -> MemoryPart:
        dtype = dtype_name(self._model.dtype)
        if self._quantization is not None:
            dtype += f", quantized ({self._quantization.title})"
        return weights_part(self._shape.parameters, num_bytes, dtype)

    def _profiled(self, tokens: int, seqs: int) -> EngineSizes:
        groups = max(1, len(self._full.groups))
        return replace(
            self._full,
            num_blocks=groups * blocks_for(tokens, self._full.block_size),
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=tokens,
        )


def in_use(account: MemoryAccount, memory: DeviceMemory) -> MemoryAccount:
    """With what the device has in use once all is taken."""
    total, free, _, _ = memory.read()
    return replace(account, in_use=total - free)


def plan_memory(subject: LoadedModel, config: Config, info: ModelInfo) -> MemoryAccount:
    """What the executor may hold, after a measured step.

    Compressed weights are dropped where the KV memory that is asked for, or a sequence of the
    model's length, has no room beside them. Raises ``ConfigError`` where it has none anyway.
    """
    compression = subject.compression

    def planned() -> MemoryAccount:
        return with_kv(beside_kv(subject, config, info), config, info, subject.groups)

    cache, longest = config.cache, config.model.max_model_len or info.max_model_len
    given = cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None
    try:
        account = planned()
    except (ConfigError, torch.OutOfMemoryError) as failure:
        if compression is None or not compression.drop(str(failure)):
            raise
        again = True
    else:
        held = account.sizes.max_model_len
        reason = f"beside them KV memory holds {held} tokens, not {longest}"
        fits = given or held >= longest
        again = not fits and compression is not None and compression.drop(reason)
    return planned() if again else account


def beside_kv(subject: LoadedModel, config: Config, info: ModelInfo) -> MemoryAccount:
    """What all but KV memory takes."""
    memory, device = ModelMemory(subject, config, info), subject.model.device
    return memory.counted() if device.type == "cpu" else memory.measured(CudaMemory(device))
