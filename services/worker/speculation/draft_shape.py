"""What drafts are made by beside the target, and what it takes of memory: told without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.config.process_fields import ClusterConfig
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_json, read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.protocol.wire.messages.engine import LayerGroup
from penstock.services.worker.memory_account import MemoryPart, shown_parameters
from penstock.services.worker.memory_plan import block_bytes
from penstock.services.worker.model_shape import read_shape
from penstock.services.worker.models.eagle3 import read_eagle3
from penstock.services.worker.models.specification import CacheSpecification
from penstock.services.worker.quantization.reading import read_quantization


class DraftShape(NamedTuple):
    """A draft head or model as memory sees it."""

    parameters: int
    caches: list[CacheSpecification]
    more: int = 0
    """Numbers beside the parameters: of a packed LM head that is the embedding too."""

    def part(self, item_bytes: int, dtype: str) -> MemoryPart:
        """Its weights, in the target's type."""
        size = (self.parameters + self.more) * item_bytes
        return MemoryPart("draft weights", size, shown_parameters(self.parameters, dtype))

    def block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Of its own keys and values in one block, which are never quantized."""
        return block_bytes(self.caches, block_size, item_bytes)


def read_draft_shape(
    config: Config, info: ModelInfo, groups: Sequence[LayerGroup], *, on_cpu: bool
) -> DraftShape | None:
    """``None``: drafts are made by nothing that takes memory. groups: of the target's layers, see
    ``LayerGroups``. Raises ``BadModelFolder``, and ``ConfigError`` where there can be none."""
    if not config.speculation.by_model:
        return None
    flag = f"--speculative {config.speculation.speculative}"
    if not on_cpu:
        raise ConfigError(
            f"{flag}: drafts of models and heads have not been checked on a GPU yet; use --device "
            "cpu, or --speculative suffix"
        )
    if groups:
        raise ConfigError(
            f"{flag}: layers of this model keep a window of their positions alone, and what "
            "drafts keeps all; use --speculative suffix"
        )
    folder = config.speculation.speculative_model
    if not Path(folder).exists():
        raise ConfigError(
            f"--speculative-model {folder}: there is no such folder, and none is fetched from the "
            "Hugging Face hub; download it and give its path"
        )
    if config.speculation.speculative == "eagle3":
        head, _ = read_eagle3(folder, info)
        return DraftShape(head.num_parameters, [head.cache])
    draft, its_config = read_draft_model(config, info)
    shape = read_shape(draft, its_config)
    return DraftShape(shape.parameters, shape.caches, shape.head_parameters)


def read_draft_model(config: Config, target: ModelInfo) -> tuple[ModelInfo, Config]:
    """A draft model and the settings that it is loaded with. Raises ``BadModelFolder`` for one that
    is no language model over the target's tokens."""
    folder = config.speculation.speculative_model
    info = read_model_info(folder)
    settings = config.model
    model = ModelConfig(
        model=folder, dtype=settings.dtype, max_model_len=settings.max_model_len, seed=settings.seed
    )
    its_config = replace(config, model=model, cluster=ClusterConfig())
    pooling = read_pooling(info, model)
    if not pooling.generates:
        raise BadModelFolder(f"{folder}: {info.architecture} does not generate: it cannot draft")
    if read_quantization(info, "none") is not None:
        raise BadModelFolder(f"{folder}: quantized weights of draft models are not supported yet")
    ours, theirs = (token_ids(one.folder) for one in (target, info))
    if ours != theirs:
        unlike = len(ours.items() ^ theirs.items())
        raise BadModelFolder(
            f"{folder}: its tokenizer.json differs from that of {target.folder} in {unlike} "
            "entries; a draft model must have the target's vocabulary"
        )
    return info, its_config


def token_ids(folder: Path) -> dict[str, int]:
    """The vocabulary in a folder's ``tokenizer.json``. Raises ``BadModelFolder``."""
    path = folder / "tokenizer.json"
    file = read_json(path)
    try:
        vocab, added = file["model"]["vocab"], file.get("added_tokens") or []
        if isinstance(vocab, list):  # of a unigram model: pairs
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        return {**vocab, **{one["content"]: one["id"] for one in added}}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadModelFolder(f"{path}: its vocabulary cannot be read") from None
