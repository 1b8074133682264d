"""What tiers of KV blocks do not go together with is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.protocol.config.tier_checks import contradictions_of_tiers

MEMORY = {"kv_tier_memory_bytes": 1 << 30}
DISK = {"kv_tier_disk": "/kv"}


def faults_of(**groups: dict[str, Any]) -> list[str]:
    """Of a configuration that differs from the default in these settings of its groups."""
    config = Config()
    changed = {
        group: msgspec.structs.replace(getattr(config, group), **settings)
        for group, settings in groups.items()
    }
    return list(contradictions_of_tiers(msgspec.structs.replace(config, **changed)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tier", [{}, MEMORY, DISK, MEMORY | DISK], ids=str)
def test_tiers_of_workers_with_one_device_are_not_refused(
    tier: dict[str, Any], device: str
) -> None:
    assert faults_of(cache=tier, device={"device": device}) == []


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ({"cache": {"kv_tier_disk_bytes": 5}}, ("--kv-tier-disk-bytes 5", "--kv-tier-disk")),
        (
            {"cache": {"kv_tier_store_after": 1}},
            ("--kv-tier-store-after 1", "--kv-tier-memory-bytes"),
        ),
        (
            {"cache": MEMORY | {"enable_prefix_caching": False}},
            ("--kv-tier-memory-bytes 1073741824", "--enable-prefix-caching"),
        ),
        (
            {"cache": DISK | {"kv_cache_dtype": "int8"}, "device": {"device": "cuda"}},
            ("--kv-tier-disk /kv", "--kv-cache-dtype int8"),
        ),
        (
            {"cache": DISK, "cluster": {"tensor_parallel_size": 2}},
            ("--kv-tier-disk /kv", "--tensor-parallel-size 2"),
        ),
        ({"cache": MEMORY, "launch": {"nodes": 2}}, ("--kv-tier-memory-bytes", "--nodes 2")),
        ({"cache": MEMORY, "launch": {"join": "tcp://r:1"}}, ("--kv-tier-memory-bytes", "--join")),
        (
            {"cache": MEMORY, "launch": {"executor": "ray"}},
            ("--kv-tier-memory-bytes", "--executor ray"),
        ),
    ],
    ids=str,
)
def test_what_tiers_do_not_work_with_is_one_line_that_names_both(
    groups: dict[str, dict[str, Any]], names: tuple[str, ...]
) -> None:
    (fault,) = faults_of(**groups)
    for name in names:
        assert name in fault
