"""Which adapter serves which architecture."""

from __future__ import annotations

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.adapter import ModelAdapter
from penstock.services.worker.models.llama import LlamaAdapter
from penstock.services.worker.models.qwen2 import Qwen2Adapter
from penstock.services.worker.models.qwen3 import Qwen3Adapter

_BUILT_IN: tuple[ModelAdapter, ...] = (LlamaAdapter(), Qwen2Adapter(), Qwen3Adapter())
ADAPTERS: dict[str, ModelAdapter] = {adapter.architecture: adapter for adapter in _BUILT_IN}


def adapter_for(info: ModelInfo) -> ModelAdapter:
    """Raises ``BadModelFolder`` that names the supported architectures."""
    adapter = ADAPTERS.get(info.architecture)
    if adapter is None:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: architecture {info.architecture!r} is not supported; "
            f"supported are {', '.join(sorted(ADAPTERS))}"
        )
    return adapter
