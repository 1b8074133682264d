"""Loads a checkpoint onto a device, measures a step, takes KV memory."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import read_machine
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes, LayerGroup
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.cpu_threads import (
    StepThreads,
    ThreadReview,
    ThreadTrial,
    agreeing,
    candidates,
    trial_capacity,
)
from penstock.services.worker.executor import PLAIN_KERNELS
from penstock.services.worker.grammar_rows import tokenizer_loader
from penstock.services.worker.kv_memory import block_shapes
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.memory import (
    EXTRA_BLOCKS,
    blocks_for,
    check_fits,
    free_host_bytes,
    plan_capacity,
)
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import Loaded, Progress, make_model
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import DenseModel, dense_config, dense_model
from penstock.services.worker.plain_attention import (
    REFERENCE,
    PlainAttention,
    choose_plain_attention,
)

if TYPE_CHECKING:
    from penstock.services.worker.gpu.compressed_layers import Compression
    from penstock.services.worker.gpu.executor import GpuExecutor

    AnyExecutor = ModelExecutor | GpuExecutor
    """Both have ``execute``."""

BY_TRANSFORMERS = "computed by transformers' modelling code"
CPU_PROFILE_TOKENS = 512
"""A step's memory on the CPU is small beside the share that is left free: measure a short one."""
CPU_KV_SHARE = 0.25
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model_executor(
    config: Config, progress: Progress, loaded: Loaded = lambda report: None
) -> AnyExecutor:
    """``loaded`` is told what was read.

    Raises ``BadModelFolder`` or ``ConfigError``, where possible before memory is taken.
    """
    info = read_model_info(config.model.model)
    device = choose_device(config.device.device, config.device.device_index)
    dtype = choose_dtype(config.model.dtype, info, device)
    cores = read_machine().physical_cores
    torch.set_num_threads(config.device.threads or cores)
    model = make_model(config, info, dtype, device, progress, loaded)
    kernels = kernels_for(model, config.cache.block_size)
    if isinstance(kernels, str):
        subject = LoadedModel(model, kernels, plain_attention(model, config.cache.block_size))
    else:
        compression = choose_compression(kernels, config, progress)
        subject = LoadedModel(model, kernels, compression=compression)
    progress("measuring a step")
    capacity = plan_memory(subject, config, info)
    progress(f"taking KV memory for {capacity.num_blocks} blocks")
    try:
        executor = subject.executor(capacity)
    except MemoryError as failure:
        raise ConfigError(
            f"KV memory for {capacity.num_blocks} blocks: {failure}; lower --num-kv-blocks or "
            "--kv-cache-memory-bytes, or let the system promise more (vm.overcommit_memory)"
        ) from failure
    executor.grammars.serve(tokenizer_loader(info))
    if isinstance(executor, ModelExecutor) and device.type == "cpu":
        progress("measuring how many threads are fastest")
        threads = set_threads(executor, model, config.device.threads, cores)
        by_others = "" if isinstance(model, Decoder) else f"{BY_TRANSFORMERS}; "
        executor.summary = by_others + threads
    elif isinstance(executor, ModelExecutor):
        executor.summary = f"{PLAIN_KERNELS}: {subject.kernels}; {subject.attention.summary}"
        run_once(executor, 1)
    else:
        progress("compiling kernels and capturing graphs")
        run_once(executor, 1)
        executor.warm_up()
    return executor


def kernels_for(model: CausalModel, block_size: int) -> DenseModel | str:
    """The model in the form of our kernels for GPUs, or why it is computed without them.

    Its weights are in that form from then on.
    """
    if model.device.type == "cpu":
        return "computed on a CPU"
    if not isinstance(model, Decoder):
        return BY_TRANSFORMERS
    config = dense_config(model.specification)
    if isinstance(config, str):
        return f"the kernels lack {config}"
    from penstock.kernels.gpu.prefill_attention import shape_for, shared_bytes

    dim = config.head_dim
    if shape_for(dim, model.dtype.itemsize, shared_bytes()) is None:
        return f"heads of {dim} in {model.dtype} need more shared memory than this device has"
    if block_size & (block_size - 1):
        return f"blocks of {block_size}; the kernels take powers of two"
    return dense_model(model.specification, model.weights)


def plain_attention(model: CausalModel, block_size: int) -> PlainAttention:
    """What attends if the model has no kernels of ours."""
    full = [cache for cache in model.caches if not (cache.window or cache.softcap)]
    if model.device.type == "cpu" or not full:
        return REFERENCE
    return choose_plain_attention(full[0], model.dtype, block_size, model.device)


def choose_compression(kernels: DenseModel, config: Config, progress: Progress) -> Compression:
    """Compressed weights for a model that our kernels compute."""
    from penstock.services.worker.gpu.compressed_layers import compress_layers, no_compression

    if config.loading.compress_weights == "never":
        return no_compression("--compress-weights never")
    progress("compressing weights")
    with torch.inference_mode():
        share = config.cache.gpu_memory_utilization * config.cache.share()
        return compress_layers(kernels.weights, share)


class LoadedModel(NamedTuple):
    """A model, and what computes it."""

    model: CausalModel
    kernels: DenseModel | str
    """``kernels_for`` it."""
    attention: PlainAttention = REFERENCE
    """If it has no kernels."""
    compression: Compression | None = None
    """If it has."""

    def executor(self, capacity: EngineSizes) -> AnyExecutor:
        if isinstance(self.kernels, str):
            return ModelExecutor(self.model, capacity, self.attention)
        from penstock.services.worker.gpu.executor import GpuExecutor

        return GpuExecutor(*self.kernels, capacity, self.compression)

    @property
    def groups(self) -> list[LayerGroup]:
        """Groups of layers with a block table each; our kernels for GPUs know of one."""
        return group_layers(self.model.caches).groups if isinstance(self.kernels, str) else []

    def block_bytes(self, block_size: int) -> int:
        """K and V of one block, which holds the layers of a group."""
        if isinstance(self.kernels, str):
            shapes = block_shapes(self.model.caches, group_layers(self.model.caches))
            numbers = sum(2 * kv_heads * dim for kv_heads, dim in shapes)
        else:
            made = self.kernels.config
            numbers = 2 * made.num_layers * made.num_kv_heads * made.head_dim
        return numbers * block_size * self.model.dtype.itemsize


def set_threads(executor: ModelExecutor, model: CausalModel, given: int | None, cores: int) -> str:
    """Compute with as many threads as ``given``, or as are fastest; returns the reason."""
    if given is None:
        trial = ModelExecutor(model, trial_capacity(executor.capacity))
        counts = candidates(cores)
        if model.dtype == torch.float32:
            counts = agreeing(trial, counts)
        threads = ThreadTrial(trial, counts)
        choice = threads.start()
        executor.threads = choice.threads
        if len(counts) > 1:
            executor.review = ThreadReview(threads)
        run_once(executor, 1)
        return str(choice)
    executor.threads = StepThreads(given, given)
    run_once(executor, 1)
    return f"{given} thread{'s' if given > 1 else ''}, as --threads says"


def choose_device(name: str, index: int = 0) -> torch.device:
    """The device to compute on; of CUDA devices this process sees one alone. ``index``: its number
    on the machine. Raises ``ConfigError`` for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        which = f"CUDA device {index} (--device-index) is not" if index else "no CUDA device is"
        raise ConfigError(f"--device cuda: {which} available; use --device cpu")
    return torch.device(name)


def choose_dtype(name: str, info: ModelInfo, device: torch.device) -> torch.dtype:
    """``auto`` is the checkpoint's dtype; the CPU computes float16 checkpoints in bfloat16."""
    chosen = info.dtype.removeprefix("torch.") if name == "auto" else name
    if chosen not in _DTYPES:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: dtype {chosen!r}; supported are {', '.join(_DTYPES)}"
        )
    if chosen == "float16" and device.type == "cpu":
        if name != "auto":
            raise ConfigError("--dtype float16: the CPU computes in bfloat16 or float32")
        chosen = "bfloat16"
    return _DTYPES[chosen]


def plan_memory(subject: LoadedModel, config: Config, info: ModelInfo) -> EngineSizes:
    """What the executor may hold, after a measured step.

    Compressed weights are dropped where the KV memory that is asked for, or a sequence of the
    model's length, has no room beside them. Raises ``ConfigError`` where it has none anyway.
    """
    compression = subject.compression

    def planned() -> EngineSizes:
        budget = kv_budget(subject, config, info)
        size = subject.block_bytes(config.cache.block_size)
        capacity = plan_capacity(config, info, size, budget, subject.groups)
        free = budget + EXTRA_BLOCKS * size
        on_host = subject.model.device.type == "cpu"
        check_fits(capacity, size, free_host_bytes() if on_host else free)
        return capacity

    cache, longest = config.cache, config.model.max_model_len or info.max_model_len
    given = cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None
    try:
        capacity = planned()
    except (ConfigError, torch.OutOfMemoryError) as failure:
        if compression is None or not compression.drop(str(failure)):
            raise
        again = True
    else:
        reason = f"beside them KV memory holds {capacity.max_model_len} tokens, not {longest}"
        fits = given or capacity.max_model_len >= longest
        again = not fits and compression is not None and compression.drop(reason)
    return planned() if again else capacity


def kv_budget(subject: LoadedModel, config: Config, info: ModelInfo) -> int:
    """Bytes left for KV memory, after a step of the largest size was measured."""
    longest = config.model.max_model_len or info.max_model_len
    tokens = min(config.scheduler.max_num_batched_tokens, longest, info.max_model_len)
    device = subject.model.device
    if device.type == "cpu":
        tokens = min(tokens, CPU_PROFILE_TOKENS)
    block_size, groups = config.cache.block_size, subject.groups
    capacity = EngineSizes(
        num_blocks=max(1, len(groups)) * blocks_for(tokens, block_size),
        block_size=block_size,
        max_num_seqs=1 if device.type == "cpu" else config.scheduler.max_num_seqs,
        max_num_batched_tokens=tokens,
        max_model_len=tokens,
        vocab_size=info.vocab_size,
        groups=groups,
    )
    if device.type == "cpu":
        run_once(subject.executor(capacity), tokens)
        return int(CPU_KV_SHARE * config.cache.share() * free_host_bytes())
    torch.cuda.reset_peak_memory_stats(device)
    executor = subject.executor(capacity)
    run_once(executor, tokens)
    del executor
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    others = total - free - held
    usable = int(config.cache.gpu_memory_utilization * total)
    # Other models' memory is within their shares, and is not taken from this one's.
    own = min(usable - others, int(config.cache.share() * usable))
    return max(0, own - peak)


def run_once(executor: AnyExecutor, tokens: int) -> float:
    """Prefill one sequence of ``tokens`` tokens and drop it again; returns the seconds."""
    capacity = executor.capacity
    blocks = list(range(max(1, len(capacity.groups)) * blocks_for(tokens, capacity.block_size)))
    ids = (np.arange(tokens, dtype=np.int64) % capacity.vocab_size).astype("<i4").tobytes()
    new = NewSlot(0, ids, tokens, 0, blocks, SlotSampling(1.0, 0, 1.0, 0).packed())
    begun = time.perf_counter()
    executor.execute(StepPlan(0, 1, True, [], [new], [], [Chunk(0, 0, tokens, True, [])]))
    executor.reset()
    return time.perf_counter() - begun
