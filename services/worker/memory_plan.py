"""From what a model takes to the KV memory that it gets: the same for a worker and for a plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.kernels.cache_kinds import KVCacheKind, stored_head
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.messages.engine import LayerGroup
from penstock.services.worker.layer_groups import LayerGroups, block_shapes, group_layers
from penstock.services.worker.memory import (
    EXTRA_BLOCKS,
    OUTSIDE_BYTES,
    TIER_STAGING_BYTES,
    check_fits,
    plan_capacity,
)
from penstock.services.worker.memory_account import MemoryAccount, MemoryPart, merged, shown_bytes
from penstock.services.worker.models.specification import CacheSpecification

CPU_KV_SHARE = 0.25
RANKS_BYTES = 1 << 30
"""What NCCL takes to connect ranks, after the profile of a step; not yet measured."""
OUTSIDE = "outside"
"""The part of an account that its worker does not take."""


def block_bytes(
    caches: Sequence[CacheSpecification],
    block_size: int,
    item_bytes: int,
    grouped: LayerGroups | None = None,
    kind: KVCacheKind = "auto",
) -> int:
    """K and V of one block, which holds the layers of a group. item_bytes: of the model's type;
    grouped: the layers, where they are not grouped by themselves alone; kind: of ``CacheConfig``.
    """
    shapes = block_shapes(caches, grouped or group_layers(caches))
    heads = (2 * kv_heads * stored_head(dim, item_bytes, kind) for kv_heads, dim in shapes)
    return sum(heads) * block_size


def cpu_account(
    config: Config, free: int, held: list[MemoryPart], step: list[MemoryPart], block: int
) -> MemoryAccount:
    """Before KV memory is planned. free: bytes that the machine has left beside what is held,
    the weights first of all; step: what the largest step takes; block: bytes of a block."""
    cache = config.cache
    left = free - sum(part.num_bytes for part in step)
    limit = "a quarter of what is free for KV memory"
    if cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None:
        limit = "KV memory as given"
    else:
        together = config.cluster.world_size  # ranks on the same host, as all of them are on CPUs
        left = min(left, int(CPU_KV_SHARE * cache.share() * left / together))
        limit += "" if cache.share() == 1.0 else f", and of that --memory-share {cache.share():g}"
    parts = merged([*held, *step])
    usable = left + sum(part.num_bytes for part in parts)
    total = free + sum(part.num_bytes for part in held)
    return MemoryAccount("cpu", total, usable, limit, parts, block)


def cuda_account(
    config: Config, device: str, total: int, parts: list[MemoryPart], outside: int, block: int
) -> MemoryAccount:
    """Before KV memory is planned. outside: bytes of ``total`` that are not the worker's to use:
    the driver's context, loaded kernels, other processes; parts: all that the worker takes beside
    them; block: bytes of a block."""
    cache, share = config.cache, config.cache.share()
    if config.cluster.world_size > 1:
        parts = [*parts, MemoryPart("ranks", RANKS_BYTES, "NCCL's buffers")]
    if cache.has_tiers:
        parts = [*parts, MemoryPart("copies", TIER_STAGING_BYTES, "of KV blocks that are kept")]
    usable = int(cache.gpu_memory_utilization * total)
    # Other models' memory is within their shares, and is not taken from this one's.
    own = min(usable - outside, int(share * usable))
    limit = f"--gpu-memory-utilization {cache.gpu_memory_utilization:g}"
    limit += "" if share == 1.0 else f", --memory-share {share:g}"
    others = MemoryPart(OUTSIDE, outside, "driver, kernels, other processes")
    later = _beside(config, parts, total - usable)
    merged_parts = merged([*parts, others])
    return MemoryAccount(device, total, own + outside, limit, merged_parts, block, beside_it=later)


def _beside(config: Config, parts: Sequence[MemoryPart], left: int) -> MemoryPart | None:
    """What another worker has on the device that is prepared for this one's end, or whose model
    sleeps: all but weights and KV memory. left: what this one may not use."""
    launch = config.launch
    if launch.sleep_level == 1:
        name, note = "asleep", "each other model that sleeps (--sleep-level 1)"
    elif launch.prepare_engines and config.loading.hold_weights:
        name, note = "prepared", "a worker for this one's end (--prepare-engines)"
    else:
        return None
    taken = OUTSIDE_BYTES + sum(part.num_bytes for part in parts if part.name != "weights")
    note += f", in the {shown_bytes(left)} that are not usable"
    return MemoryPart(name, taken, f"{note}, which are too few" if taken > left else note)


def with_kv(
    account: MemoryAccount, config: Config, info: ModelInfo, groups: Sequence[LayerGroup]
) -> MemoryAccount:
    """The account with KV memory in what is left. Raises ``ConfigError`` where it does not fit."""
    if account.left <= 0:
        outside = account.bytes_of(OUTSIDE)
        own = max(0, account.usable - outside)
        taken = f"; {shown_bytes(outside)} are the driver's, kernels' and other processes'"
        raise ConfigError(
            f"without KV memory the model takes {shown_bytes(account.beside - outside)}, and "
            f"{shown_bytes(own)} of {shown_bytes(account.total)} may be used "
            f"by it ({account.limit}{taken if outside else ''}); `penstock plan` says of what, "
            "and what would fit"
        )
    budget = max(0, account.left - EXTRA_BLOCKS * account.block_bytes)
    capacity = plan_capacity(config, info, account.block_bytes, budget, groups)
    check_fits(capacity, account.block_bytes, account.left)
    return msgspec.structs.replace(account, capacity=capacity)
