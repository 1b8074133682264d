"""Which adapter serves which architecture.

Other packages add theirs under the entry point group ``penstock.models``: the name is the
architecture, the object an adapter. One of ours cannot be replaced.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, entry_points

from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.models.adapter import ModelAdapter
from penstock.services.worker.models.cohere import CohereAdapter
from penstock.services.worker.models.exaone import Exaone4Adapter
from penstock.services.worker.models.experts import num_experts, words_of_experts
from penstock.services.worker.models.gemma import Gemma2Adapter, Gemma3Adapter, GemmaAdapter
from penstock.services.worker.models.glm import Glm4Adapter
from penstock.services.worker.models.granite import GraniteAdapter, GraniteSwaAdapter
from penstock.services.worker.models.llama import LlamaAdapter
from penstock.services.worker.models.mistral import MistralAdapter
from penstock.services.worker.models.olmo import OlmoAdapter
from penstock.services.worker.models.phi import Phi3Adapter
from penstock.services.worker.models.qwen import Qwen2Adapter, Qwen3Adapter
from penstock.services.worker.models.smollm3 import SmolLM3Adapter
from penstock.services.worker.models.specification import ModelSpecification
from penstock.services.worker.models.starcoder2 import Starcoder2Adapter

ENTRY_POINTS = "penstock.models"
_BUILT_IN: tuple[ModelAdapter, ...] = (
    CohereAdapter(),
    Exaone4Adapter(),
    GemmaAdapter(),
    Gemma2Adapter(),
    Gemma3Adapter(),
    Glm4Adapter(),
    GraniteAdapter(),
    GraniteSwaAdapter(),
    LlamaAdapter(),
    MistralAdapter(),
    OlmoAdapter(),
    Phi3Adapter(),
    Qwen2Adapter(),
    Qwen3Adapter(),
    SmolLM3Adapter(),
    Starcoder2Adapter(),
)
ADAPTERS: dict[str, ModelAdapter] = {
    architecture: adapter for adapter in _BUILT_IN for architecture in adapter.architectures
}


_WITHOUT_HEAD = (
    "TextForSequenceClassification", "ForSequenceClassification", "TextModel", "Model",
)  # fmt: skip


def causal_name(architecture: str) -> str:
    """The architecture of the language model whose layers another one has: ``Qwen3Model`` and
    ``Qwen3ForSequenceClassification`` have those of ``Qwen3ForCausalLM``."""
    for suffix in _WITHOUT_HEAD:
        if architecture.endswith(suffix):
            name = f"{architecture.removesuffix(suffix)}ForCausalLM"
            if name in ADAPTERS:
                return name
    return architecture


def is_native(info: ModelInfo) -> bool:
    """Whether the model is of a family that has an adapter."""
    return causal_name(info.architecture) in ADAPTERS or bool(_entries(info.architecture))


def adapter_for(info: ModelInfo) -> ModelAdapter:
    """Raises ``BadModelFolder`` that names the supported architectures, or the package whose
    adapter cannot be loaded."""
    name = causal_name(info.architecture)
    adapter = ADAPTERS.get(name) or _of_others(info.architecture)
    if adapter is None:
        reason = f"architecture {info.architecture!r} is not supported"
        if count := num_experts(info):
            reason = words_of_experts(info.architecture, count)
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: {reason}; "
            f"families of our own are {', '.join(sorted(ADAPTERS))}; --model-impl auto lets "
            "transformers compute others"
        )
    return adapter


def own_specification(info: ModelInfo) -> ModelSpecification:
    """What the adapter of a model makes of it. Raises ``BadModelFolder`` for what it refuses, and
    for a mixture of experts, whoever wrote the adapter."""
    model = adapter_for(info).specification(info)
    experts = next((each.mlp.experts for each in model.layers if each.mlp.experts), None)
    if experts is not None:
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: {words_of_experts(info.architecture, experts.count)}; "
            "take a dense model of the family"
        )
    return model


def _of_others(architecture: str) -> ModelAdapter | None:
    entries = tuple(_entries(architecture))
    if not entries:
        return None
    packages = ", ".join(sorted(_package(entry) for entry in entries))
    if len(entries) > 1:
        raise BadModelFolder(
            f"architecture {architecture!r} has {len(entries)} adapters, of the packages "
            f"{packages}; uninstall all but one"
        )
    try:
        adapter: ModelAdapter = entries[0].load()
    except Exception as failure:  # whatever the package's code raises
        raise BadModelFolder(
            f"architecture {architecture!r}: the adapter {entries[0].value!r} of the package "
            f"{packages} cannot be loaded: {type(failure).__name__}: {failure}"
        ) from failure
    return adapter


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


def _entries(architecture: str) -> EntryPoints:
    return entry_points(group=ENTRY_POINTS, name=architecture)
