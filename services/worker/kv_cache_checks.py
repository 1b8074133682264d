"""What ``--kv-cache-dtype`` does not go together with, told before KV memory is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.config import Config, ConfigError

if TYPE_CHECKING:
    import torch

FP8_CAPABILITY = (8, 9)
"""Least compute capability of GPUs whose kernels read e4m3."""


def check_for_gpu(config: Config, capability: tuple[int, int]) -> None:
    """Raises ``ConfigError`` where a GPU of this compute capability, which need not be there, or
    the ranks on it, cannot."""
    kind = config.cache.kv_cache_dtype
    if kind == "auto":
        return
    if reason := refused_on_gpus(config):
        raise ConfigError(f"--kv-cache-dtype {kind} {reason}")
    if config.cache.kv_kind == "fp8" and capability < FP8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype {kind} needs a GPU of compute capability 8.9, and this one has "
            f"{capability[0]}.{capability[1]}; int8 takes as much memory"
        )


def refused_on_gpus(config: Config) -> str:
    """Why a model with these settings cannot have it on a GPU, whichever that is; empty: it can."""
    if config.cluster.world_size > 1:
        return (
            "works on one GPU: it has not been checked with a model that is divided among GPUs "
            "yet; leave it out"
        )
    for flag, given in (
        (f"--speculative {config.speculation.speculative}", config.speculation.drafts),
        ("--kv-tier-memory-bytes or --kv-tier-disk", config.cache.has_tiers),
    ):
        if given:
            return f"and {flag} have not been checked together on a GPU yet; leave one out"
    return ""


def check_kernels(config: Config, device: torch.device, plain: str) -> None:
    """plain: why torch's operations compute attention, empty if our kernels do. Raises
    ``ConfigError`` where those have not been checked."""
    kind = config.cache.kv_cache_dtype
    if kind != "auto" and device.type != "cpu" and plain:
        raise ConfigError(
            f"--kv-cache-dtype {kind} works on a GPU where Penstock's kernels attend, and here "
            f"torch's operations would: {plain}; leave it out"
        )
