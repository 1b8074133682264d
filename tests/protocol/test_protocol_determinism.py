"""What ``--deterministic`` does not go together with is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.protocol.config.determinism import contradictions_of_determinism


def faults_of(**groups: dict[str, Any]) -> list[str]:
    """Of a deterministic configuration that differs from the default in these settings."""
    config = Config()
    changed = {
        group: msgspec.structs.replace(getattr(config, group), **settings)
        for group, settings in groups.items()
    }
    config = msgspec.structs.replace(config, **changed)
    device = msgspec.structs.replace(config.device, deterministic=True)
    return list(contradictions_of_determinism(msgspec.structs.replace(config, device=device)))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_one_device_and_plain_weights_are_not_refused(device: str) -> None:
    assert faults_of(device={"device": device}) == []


@pytest.mark.parametrize(
    ("groups", "other"),
    [
        ({"device": {"device": "null"}}, "--device null"),
        ({"model": {"model_impl": "transformers"}}, "--model-impl transformers"),
        ({"model": {"task": "embed"}}, "--task"),
        ({"device": {"device": "cpu"}, "model": {"dtype": "bfloat16"}}, "--dtype bfloat16"),
        ({"model": {"quantization": "int8"}}, "--quantization int8"),
        ({"cache": {"kv_cache_dtype": "int8"}}, "--kv-cache-dtype int8"),
        ({"cluster": {"tensor_parallel_size": 2}}, "2 devices"),
        ({"loading": {"lora": ["a=/a"]}}, "--lora:"),
        ({"launch": {"lora_dirs": ["/a"]}}, "--lora-dirs"),
        ({"speculation": {"speculative": "suffix"}}, "--speculative suffix"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_fixed_order_is_refused(groups: dict[str, dict[str, Any]], other: str) -> None:
    (fault,) = faults_of(**groups)
    assert fault.startswith("--deterministic") and other in fault
