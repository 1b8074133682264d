"""What KV blocks outside of an engine's memory do not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.cache_fields import CacheConfig
from penstock.protocol.config.fields import Config


def contradictions_of_tiers(config: Config) -> Iterator[str]:
    """One line for each."""
    cache, launch, cluster = config.cache, config.launch, config.cluster
    if not cache.has_tiers:
        default = CacheConfig()
        for name in ("kv_tier_disk_bytes", "kv_tier_store_after"):
            if getattr(cache, name) != getattr(default, name):
                yield (
                    f"--{name.replace('_', '-')} {getattr(cache, name)} needs "
                    + ("--kv-tier-disk" if "disk" in name else "--kv-tier-memory-bytes or -disk")
                )
        return
    flag = (
        f"--kv-tier-disk {cache.kv_tier_disk}"
        if cache.kv_tier_disk
        else f"--kv-tier-memory-bytes {cache.kv_tier_memory_bytes}"
    )
    if not cache.enable_prefix_caching:
        yield f"{flag} keeps what the prefix cache finds: it needs --enable-prefix-caching"
    if config.device.device == "cuda" and cache.kv_kind != "auto":
        yield (
            f"{flag} works on a GPU with keys and values in the model's type, not with "
            f"--kv-cache-dtype {cache.kv_cache_dtype}"
        )
    if cluster.world_size > 1:
        yield (
            f"{flag} works with engines of one worker, not with --tensor-parallel-size "
            f"{cluster.tensor_parallel_size} and --pipeline-parallel-size "
            f"{cluster.pipeline_parallel_size}"
        )
    if launch.nodes > 1 or launch.join or launch.executor == "ray":
        given = f"--nodes {launch.nodes}" if launch.nodes > 1 else "--join"
        given = "--executor ray" if launch.executor == "ray" else given
        yield f"{flag} works on one host, not with {given}"
