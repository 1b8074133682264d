"""Configuration of KV memory and of the prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: Annotated[
        Literal[8, 16, 32, 64], Meta(description="Tokens in one block of KV memory.")
    ] = 16
    num_kv_blocks: Annotated[
        Annotated[int, Meta(ge=2, le=2**31 - 1)] | None,
        Meta(description="Number of KV blocks; by default as many as fit."),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=2**50)] | None,
        Meta(description="Bytes of KV memory; by default, on a CPU, a quarter of what is free."),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3", "int8"],
        Meta(
            description="Type of keys and values in KV memory: auto is the model's; fp8 (e4m3) and "
            "int8 take a byte a number and hold nearly twice the tokens, rounded."
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1.0,
            description="Share of a GPU's memory that may be used for everything together.",
        ),
    ] = 0.9
    memory_share: Annotated[
        list[Annotated[float, Meta(gt=0.0, le=1.0)]],
        Meta(
            description="Part of the memory that a model may use of what it would use alone, once "
            "for each model in their order; by default equal parts."
        ),
    ] = []
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse KV blocks of prompts that begin alike.")
    ] = True
    retained_cache_share: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="Share of the KV blocks that requests may have retained (cache_control): "
            "they are reused after all others; 0: none.",
        ),
    ] = 0.5
    tenant_cache_share: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1.0,
            description="Share of the KV blocks that the prefix cache may hold of one tenant "
            "before that tenant's are reused ahead of all others; 1: any.",
        ),
    ] = 1.0
    kv_tier_memory_bytes: Annotated[
        Annotated[int, Meta(ge=2**20, le=2**50)] | None,
        Meta(
            description="Bytes of the host's memory, for each model, for KV blocks that its "
            "engines have no room for; a keeper process holds them. With --kv-tier-disk by default "
            "1 GiB."
        ),
    ] = None
    kv_tier_disk: Annotated[
        str,
        Meta(
            description="Private folder in which the keeper also writes KV blocks to disk, where "
            "they are found again after a restart."
        ),
    ] = ""
    kv_tier_disk_bytes: Annotated[
        int,
        Meta(
            ge=2**20,
            le=2**60,
            description="Most bytes of files below --kv-tier-disk; the least lately used go first.",
        ),
    ] = 16 * 2**30
    kv_tier_store_after: Annotated[
        Literal[1, 2],
        Meta(
            description="Prompts that a KV block must have been part of before it is kept outside "
            "of the engine's memory."
        ),
    ] = 2

    @property
    def kv_kind(self) -> Literal["auto", "fp8", "int8"]:
        """What numbers of keys and values are stored as: ``fp8_e4m3`` is ``fp8``."""
        return "fp8" if self.kv_cache_dtype == "fp8_e4m3" else self.kv_cache_dtype

    @property
    def has_tiers(self) -> bool:
        """KV blocks are kept outside of the engines' memory, too."""
        return self.kv_tier_memory_bytes is not None or bool(self.kv_tier_disk)

    @property
    def tier_memory_bytes(self) -> int:
        """Of each model."""
        return self.kv_tier_memory_bytes or 2**30

    def share(self) -> float:
        """The part of the memory that one model may use."""
        return self.memory_share[0] if self.memory_share else 1.0
