"""``penstock plan``: what a worker would take of a device's memory, told before anything is loaded.

It refuses what a worker refuses (``ahead_checks``), and makes the account that a worker makes at
its start (``memory_plan``), with sizes from the model's ``config.json`` and the headers of its
files instead of what is measured. torch is imported only to ask a GPU of this machine for its
memory, and to compare a model with its files.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from penstock.kernels.gpu.device_facts import USUAL_MULTIPROCESSORS
from penstock.kernels.quantized_kinds import SPACE_BYTES
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import free_host_bytes
from penstock.protocol.config.model_dtype import ITEM_BYTES
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.ahead_checks import check_all, type_name
from penstock.services.worker.alternatives import alternatives
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.cuda_driver import CudaDevice
from penstock.services.worker.gpu.static_memory import (
    LIBRARY_BYTES,
    ExecutorSizes,
    of_profile,
    widens_keys,
)
from penstock.services.worker.gpus import GPUS, Gpu
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.memory import EXTRA_BLOCKS, OUTSIDE_BYTES
from penstock.services.worker.memory_account import (
    GIB,
    MemoryAccount,
    MemoryPart,
    shown_bytes,
    table,
    weights_part,
)
from penstock.services.worker.memory_plan import block_bytes, cpu_account, cuda_account, with_kv
from penstock.services.worker.model_shape import (
    BY_TRANSFORMERS,
    ModelShape,
    QuantizedShape,
    read_shape,
)
from penstock.services.worker.models.dense import DenseConfig, caches_of, paged_config
from penstock.services.worker.models.specification import CacheSpecification
from penstock.services.worker.plain_memory import activations, plain_parts, rotary_tables
from penstock.services.worker.speculation.draft_shape import read_draft_shape

CANNOT_FIT = 1
"""Exit code."""
PROCESS_BYTES = GIB // 2
"""What the processes of a server take on a CPU beside weights and steps."""
_NARROW, _COMPRESSED_SHARE, _MOST_MEMORY, _MOST_LEFT = 2048, 0.76, 1 / 6, 0.25
"""As in ``penstock.services.worker.gpu.compressed_layers``."""
_WIDE_HEADS, _LARGE_SHARED = 128, ((9, 0), (10, 0))
"""Wider heads take more shared memory in fp32 than programs have on other compute capabilities
than these, as in ``penstock.kernels.gpu.prefill_attention``."""
_RANK_UNIT = 16
"""As in ``penstock.kernels.gpu.low_rank``."""
_COMPRESSED = "compressed ones for few rows"
_GPUS_NAMED = 3
_WORTH_SAYING = 1.01
_ESTIMATE = [
    "",
    "An estimate: transformers' code computes this model, and which heads and windows it keeps is "
    "known when it is loaded",
]


class PlannedDevice(msgspec.Struct, frozen=True):
    """What is planned for."""

    name: str
    total: int
    """Bytes; on a CPU those that are free."""
    outside: int = 0
    """Bytes of a GPU that are not the worker's."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a GPU."""
    multiprocessors: int = USUAL_MULTIPROCESSORS

    @property
    def hopper(self) -> bool:
        return self.capability == (9, 0)

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


def planned_device(config: Config, gpu: Gpu | None) -> PlannedDevice:
    """The GPU that was named, or what this machine has."""
    if gpu is not None:
        return device_of(gpu)
    if config.device.device != "cuda":
        return PlannedDevice("cpu", free_host_bytes())
    import torch

    index = config.device.device_index
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    capability, count = (properties.major, properties.minor), properties.multi_processor_count
    outside = total - free + OUTSIDE_BYTES // 2  # the context of this process is there already
    return PlannedDevice(properties.name, total, outside, capability, count)


def device_of(gpu: Gpu) -> PlannedDevice:
    return PlannedDevice(
        gpu.title, gpu.usable_bytes, OUTSIDE_BYTES, gpu.capability, gpu.multiprocessors
    )


def device_found(found: CudaDevice) -> PlannedDevice:
    """One that the driver has told of."""
    return PlannedDevice(
        found.name, found.total_bytes, OUTSIDE_BYTES, found.capability, found.multiprocessors
    )


class Planner:
    """Accounts of one model on one device, for several configurations."""

    def __init__(self, info: ModelInfo, device: PlannedDevice) -> None:
        self.info, self.device = info, device

    def account(self, config: Config) -> MemoryAccount:
        """With KV memory. Raises ``ConfigError`` where none fits, or less than is asked for."""
        compressed = self._with_kv(config, compressed=config.cluster.world_size == 1)
        if isinstance(compressed, MemoryAccount):
            longest = config.model.max_model_len or self.info.max_model_len
            given = config.cache.num_kv_blocks or config.cache.kv_cache_memory_bytes
            if given or compressed.sizes.max_model_len >= longest:
                return compressed
        plain = self._with_kv(config, compressed=False)
        if isinstance(plain, ConfigError):
            raise plain
        return plain

    def _with_kv(self, config: Config, *, compressed: bool) -> MemoryAccount | ConfigError:
        try:
            account = self.beside_kv(config, compressed=compressed)
            caches = self._caches(config, read_shape(self.info, config))
            return with_kv(account, config, self.info, group_layers(caches).groups)
        except ConfigError as failure:
            return failure

    def beside_kv(self, config: Config, *, compressed: bool = False) -> MemoryAccount:
        """All but KV memory. compressed: with compressed weights where a worker would have them."""
        shape, dtype = read_shape(self.info, config), self.type_name(config)
        item, caches = ITEM_BYTES[dtype], self._caches(config, shape)
        block = block_bytes(caches, config.cache.block_size, item, kind=config.cache.kv_kind)
        groups = group_layers(caches).groups
        draft = read_draft_shape(config, self.info, groups, on_cpu=self.device.is_cpu)
        block += 0 if draft is None else draft.block_bytes(config.cache.block_size, item)
        sizes = EngineSizes(
            num_blocks=0,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.model.max_model_len or self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            groups=groups,
        )
        weights = weights_of(shape, item, dtype, on_cpu=self.device.is_cpu)
        if self.device.is_cpu:
            # Weights are packed for products; the embedding stays beside a plain LM head.
            coded = shape.quantized is not None and shape.quantized.coded_head
            head = 0 if coded else shape.head_parameters * item
            parts = [replace(weights, num_bytes=weights.num_bytes + head)]
            parts += [] if draft is None else [draft.part(item, dtype)]
            free = self.device.total - sum(part.num_bytes for part in parts) - PROCESS_BYTES
            return cpu_account(config, free, parts, plain_parts(shape, sizes, item, "cpu"), block)
        kernels, alone = self._kernels(config, shape), self._attention(config, shape)
        parts = [weights, MemoryPart("step", LIBRARY_BYTES // 2)]
        if kernels is not None:
            parts[0] = replace(weights, num_bytes=_dense_bytes(shape, item))
            adapters = _adapters(config, shape, item)
            executor = self._sizes(config, kernels, sizes, item, alone=False)
            parts += of_profile(replace(executor, adapted=bool(adapters)), 0)
            parts += adapters
            parts += self._compressed(config, shape, item) if compressed else []
        elif alone is not None:
            executor = self._sizes(config, alone, sizes, item, alone=True)
            parts += of_profile(executor, activations(shape, executor.rows, item))
            parts.append(rotary_tables(shape, sizes.max_model_len))
        else:
            parts += plain_parts(shape, sizes, item, "cuda")
        device = self.device
        return cuda_account(config, device.name, device.total, parts, device.outside, block)

    def _sizes(
        self, config: Config, form: DenseConfig, sizes: EngineSizes, item: int, *, alone: bool
    ) -> ExecutorSizes:
        kind, block_size = config.cache.kv_kind, config.cache.block_size
        widens = widens_keys(form, kind, item, block_size, hopper=self.device.hopper)
        return ExecutorSizes(form, sizes, item, alone, self.device.multiprocessors, widens=widens)

    def type_name(self, config: Config) -> str:
        return type_name(config.model.dtype, self.info, on_cpu=self.device.is_cpu)

    def may_quantize(self, config: Config) -> bool:
        """Whether weights are plain and may be rounded while they are read."""
        shape = read_shape(self.info, config)
        return shape.quantized is None and shape.dense != BY_TRANSFORMERS

    def _kernels(self, config: Config, shape: ModelShape) -> DenseConfig | None:
        """What the kernels of GPUs compute of layers; ``None``: nothing."""
        dense = shape.dense
        fits = isinstance(dense, DenseConfig) and self._fits(config, dense)
        return dense if isinstance(dense, DenseConfig) and fits else None

    def _attention(self, config: Config, shape: ModelShape) -> DenseConfig | None:
        """Of what model the kernels of GPUs compute attention alone; ``None``: of none."""
        if isinstance(shape.dense, DenseConfig):
            return None
        form = paged_config(shape.caches, shape.hidden, shape.mlp_width, shape.vocab)
        fits = isinstance(form, DenseConfig) and self._fits(config, form)
        return form if isinstance(form, DenseConfig) and fits else None

    def _fits(self, config: Config, form: DenseConfig) -> bool:
        """Whether the device's kernels take heads and blocks of this size."""
        size = config.cache.block_size
        if self.device.is_cpu or size & (size - 1):
            return False
        large = form.head_dim > _WIDE_HEADS and self.type_name(config) == "float32"
        return not large or self.device.capability in _LARGE_SHARED

    def _caches(self, config: Config, shape: ModelShape) -> list[CacheSpecification]:
        """What each layer keeps."""
        kernels = self._kernels(config, shape)
        return shape.caches if kernels is None else caches_of(kernels)

    def is_compressed(self, config: Config, share: float = 1.0) -> bool:
        """Whether a worker has compressed weights, too, where their room is as large as planned,
        times ``share``."""
        shape, item = read_shape(self.info, config), ITEM_BYTES[self.type_name(config)]
        return bool(self._compressed(config, shape, item, share))

    def _compressed(
        self, config: Config, shape: ModelShape, item: int, share: float = 1.0
    ) -> list[MemoryPart]:
        if shape.quantized is not None:
            return []
        never = config.loading.compress_weights == "never" or config.device.deterministic
        never |= not self.device.hopper
        if never or shape.hidden < _NARROW or self.type_name(config) != "bfloat16":
            return []
        wanted = int(_COMPRESSED_SHARE * (shape.dense_parameters - shape.table_parameters) * item)
        usable = config.cache.gpu_memory_utilization * config.cache.share() * self.device.total
        left = usable - self.device.outside - _dense_bytes(shape, item)
        if wanted > share * max(0.0, min(_MOST_MEMORY * usable, _MOST_LEFT * left)):
            return []
        return [MemoryPart("weights", wanted, _COMPRESSED)]


def has_compressed(account: MemoryAccount) -> bool:
    """Whether there are compressed weights beside the plain ones."""
    return any(_COMPRESSED in part.note for part in account.parts)


def weights_of(shape: ModelShape, item: int, dtype: str, *, on_cpu: bool) -> MemoryPart:
    """item: bytes of a plain weight."""
    if shape.quantized is None:
        return weights_part(shape.parameters, shape.parameters * item, dtype)
    size = shape.quantized.cpu if on_cpu else shape.quantized.gpu
    title, space = titled(dtype, shape.quantized), 0 if on_cpu else SPACE_BYTES
    return weights_part(shape.parameters, size.num_bytes(item) + space, title)


def titled(dtype: str, quantized: QuantizedShape) -> str:
    """``bfloat16, quantized (int8)``."""
    return f"{dtype}, quantized ({quantized.title})"


def _adapters(config: Config, shape: ModelShape, item: int) -> list[MemoryPart]:
    """The places of adapters on a GPU, which are taken at the start, if there are any."""
    loading = config.loading
    if not loading.lora and not config.launch.lora_dirs:
        return []
    rank = -(-loading.max_lora_rank // _RANK_UNIT) * _RANK_UNIT
    size = loading.max_loras * rank * shape.adapter_width * item
    return [MemoryPart("adapters", size, f"{loading.max_loras} places of rank {rank}")]


def _dense_bytes(shape: ModelShape, item: int) -> int:
    """Of the weights in the form of the kernels of GPUs."""
    if shape.quantized is not None:
        more = shape.fp32_norms * (ITEM_BYTES["float32"] - item)
        return shape.quantized.gpu.num_bytes(item) + more + SPACE_BYTES
    return shape.dense_parameters * item + shape.fp32_norms * (ITEM_BYTES["float32"] - item)


def report(config: Config, gpu: Gpu | None) -> tuple[str, int]:
    """The plan in lines, and the exit code: ``CANNOT_FIT`` where there is no room.

    Raises ``BadModelFolder`` and ``ConfigError`` for what is wrong whatever the memory.
    """
    info = read_model_info(config.model.model)
    if config.loading.load_format != "dummy":
        try:
            Checkpoint(info.folder)
        except BadModelFolder as error:
            raise BadModelFolder(
                f"{error} (--load-format dummy plans by its config.json alone)"
            ) from None
    planner = Planner(info, planned_device(config, gpu))
    device = planner.device
    check_all(config, info, None if device.is_cpu else device.capability)
    beside = planner.beside_kv(config)
    estimate = _ESTIMATE if read_shape(info, config).estimated else []
    try:
        account = planner.account(config)
    except ConfigError as failure:
        lines = [*table(beside), *estimate, "", f"It does not fit: {failure}"]
        return "\n".join(lines + _section("What would fit:", fitting(planner, config))), CANNOT_FIT
    advice = _section("What would change it:", changes(planner, config, account))
    return "\n".join([*table(account), *estimate, *advice]), 0


def _section(title: str, lines: Iterator[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return ["", title, *found] if found else []


def changes(planner: Planner, config: Config, account: MemoryAccount) -> Iterator[str]:
    """What other settings would give."""
    sizes = account.sizes
    longest = config.model.max_model_len or planner.info.max_model_len
    if sizes.max_model_len < longest:
        missing = sizes.sequence_blocks(longest) + EXTRA_BLOCKS
        more = missing * account.block_bytes - account.kv_bytes
        yield f"{longest:,} tokens in one sequence need {shown_bytes(more)} more of KV memory"
        if planner.device.is_cpu:
            yield f"--kv-cache-memory-bytes {missing * account.block_bytes} holds them"
    if account.sequences < sizes.max_num_seqs and not sizes.groups:
        each = account.kv_tokens // sizes.max_num_seqs
        yield f"{sizes.max_num_seqs} sequences at once: each may have {each:,} tokens"
    for flag, changed in alternatives(planner, config):
        try:
            other = planner.account(changed)
        except ConfigError:
            continue
        if other.kv_tokens > _WORTH_SAYING * account.kv_tokens:
            yield (
                f"{flag}: {other.kv_tokens:,} tokens of KV memory, the longest context "
                f"{other.sizes.max_model_len:,}"
            )


def fitting(planner: Planner, config: Config) -> Iterator[str]:
    """What is in the way, and which settings would fit."""
    beside = planner.beside_kv(config)
    if beside.left < (EXTRA_BLOCKS + 1) * beside.block_bytes:
        missing = (EXTRA_BLOCKS + 1) * beside.block_bytes - beside.left
        yield f"{shown_bytes(missing)} more memory, for the smallest KV memory alone"
    elif config.model.max_model_len:
        freed = replace(config, model=replace(config.model, max_model_len=None))
        try:
            most = planner.account(freed).sizes.max_model_len
        except ConfigError:
            most = 0
        if 0 < most < config.model.max_model_len:
            yield f"--max-model-len {most}"
    for flag, changed in alternatives(planner, config):
        try:
            other = planner.account(changed)
        except ConfigError:
            continue
        yield f"{flag}: {other.kv_tokens:,} tokens of KV memory"
    if not planner.device.is_cpu:
        yield from larger(planner, config)


def larger(planner: Planner, config: Config) -> Iterator[str]:
    """The smallest GPUs that would do."""
    found = 0
    for name, gpu in sorted(GPUS.items(), key=lambda item: item[1].memory):
        if gpu.usable_bytes > planner.device.total and found < _GPUS_NAMED:
            try:
                account = Planner(planner.info, device_of(gpu)).account(config)
            except ConfigError:
                continue
            found += 1
            yield f"--gpu {name}: {account.kv_tokens:,} tokens of KV memory"
