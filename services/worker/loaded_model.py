"""A model on its device, and what computes it there: kernels for GPUs or torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.protocol.wire.messages.engine import EngineSizes, LayerGroup
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.executor import PLAIN_KERNELS
from penstock.services.worker.layer_groups import LayerGroups, group_layers
from penstock.services.worker.memory_plan import block_bytes
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_shape import BY_TRANSFORMERS
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import (
    DenseConfig,
    caches_of,
    dense_config,
    paged_config,
)
from penstock.services.worker.models.dense_form import DenseModel, dense_model
from penstock.services.worker.models.rank_decoder import RankDecoder
from penstock.services.worker.models.specification import (
    CacheSpecification,
    ModelSpecification,
    cache_of,
)
from penstock.services.worker.models.transformers_model import TransformersModel
from penstock.services.worker.plain_attention import REFERENCE, AnyAttention
from penstock.services.worker.rank_executor import RankExecutor, SilentExecutor

if TYPE_CHECKING:
    from penstock.services.worker.adapters.model_adapters import ModelAdapters
    from penstock.services.worker.gpu.compressed_layers import Compression
    from penstock.services.worker.step_profile import AnyExecutor


class AttentionAlone(NamedTuple):
    """A model of which our kernels for GPUs compute attention and what comes behind the logits."""

    config: DenseConfig
    """From ``paged_config``."""
    reason: str
    """Why not the layers too."""


class LoadedModel(NamedTuple):
    """A model, and what computes it."""

    model: CausalModel
    kernels: DenseModel | AttentionAlone | str
    """``kernels_for`` it."""
    attention: AnyAttention = REFERENCE
    """If it has no kernels."""
    compression: Compression | None = None
    """If it has."""
    kind: KVCacheKind = "auto"
    """Of its KV memory."""
    adapters: ModelAdapters | None = None
    """Of rows that ask for one."""
    deterministic: bool = False
    """Whether kernels add up in one order."""
    held_bytes: int = 0
    """Of mapped memory in which its weights lie, which is no allocator's."""
    kv_memory: Tensor | None = None
    """uint8 [bytes], mapped as well: what KV memory lies in; ``None``: in the allocator's."""

    def executor(self, capacity: EngineSizes) -> AnyExecutor:
        if isinstance(self.kernels, str):
            return self._plain(capacity)
        if isinstance(self.kernels, AttentionAlone):
            from penstock.services.worker.gpu.model_decoder import model_executor

            words = f"{PLAIN_KERNELS}: {self.kernels.reason}"
            return model_executor(self.model, words, capacity, self.kind)
        if isinstance(self.model, RankDecoder):
            from penstock.services.worker.gpu.rank_executor import rank_executor

            ranks, grouped = self.model.ranks, self.model.grouped
            return rank_executor(*self.kernels, capacity, ranks, grouped, self.kind)
        from penstock.services.worker.adapters.device_adapters import DeviceAdapters
        from penstock.services.worker.gpu.decoder import dense_executor

        if self.deterministic:
            from penstock.services.worker.gpu.fixed_decoder import FixedDecoder

            return dense_executor(
                *self.kernels, capacity, decoder=FixedDecoder, kv_memory=self.kv_memory
            )
        adapters = self.adapters if isinstance(self.adapters, DeviceAdapters) else None
        return dense_executor(
            *self.kernels, capacity, self.compression, self.kind, adapters, kv_memory=self.kv_memory
        )

    def _plain(self, capacity: EngineSizes) -> ModelExecutor:
        if not isinstance(self.model, RankDecoder):
            drafts = self.model.device.type == "cpu"
            plain = DraftingExecutor if drafts else ModelExecutor
            return plain(self.model, capacity, self.attention, self.kind)
        kind = RankExecutor if self.model.ranks.place.is_last else SilentExecutor
        return kind(self.model, capacity, self.attention, self.kind)

    @property
    def caches(self) -> Sequence[CacheSpecification]:
        """What each layer keeps."""
        if isinstance(self.kernels, DenseModel):
            return caches_of(self.kernels.config)
        return self.model.caches

    @property
    def groups(self) -> list[LayerGroup]:
        """Groups of layers with a block table each."""
        return self._grouped.groups

    @property
    def _grouped(self) -> LayerGroups:
        if isinstance(self.model, RankDecoder):
            return self.model.grouped
        return group_layers(self.caches)

    @property
    def compressed(self) -> bool:
        """Whether its weights are there compressed, too."""
        return self.compression is not None and bool(self.compression.linears)

    def block_bytes(self, block_size: int) -> int:
        """K and V of one block, which holds the layers of a group."""
        item = self.model.dtype.itemsize
        return block_bytes(self.caches, block_size, item, self._grouped, self.kind)


def kernels_for(model: CausalModel, block_size: int) -> DenseModel | AttentionAlone | str:
    """What our kernels for GPUs compute of a model, or why nothing.

    The weights of a ``DenseModel`` are in its form from then on.
    """
    if model.device.type == "cpu":
        return "computed on a CPU"
    from penstock.services.worker.gpu.triton_trial import why_no_kernels

    if reason := why_no_kernels(model.device):
        return reason
    if isinstance(model, Decoder):
        form = form_for_kernels(model.specification, model.dtype.itemsize, block_size)
        if isinstance(form, DenseConfig):
            if isinstance(model, RankDecoder):
                form = model.own_vocabulary(form)
            return dense_model(form, model.specification, model.weights)
        if isinstance(model, RankDecoder):
            return f"{form}, and the model is divided among ranks"
        return _attention_alone(model, block_size, form)
    return _attention_alone(model, block_size, words_of_others(model))


def words_of_others(model: CausalModel) -> str:
    """How and why transformers' code computes it, for the log."""
    words = BY_TRANSFORMERS
    if isinstance(model, TransformersModel) and model.replaced:
        words += f", {model.replaced} by our kernels"
    if isinstance(model, TransformersModel) and model.refusal:
        words += f", because its own family refuses it ({model.refusal})"
    return words


def _attention_alone(model: CausalModel, block_size: int, reason: str) -> AttentionAlone | str:
    """reason: why the kernels compute no layers. The result says why not attention either."""
    config = attention_for_kernels(
        model.caches, model.hidden_size, model.vocab_size, model.dtype.itemsize, block_size
    )
    if isinstance(config, str):
        return f"{reason}; attention: {config}"
    return AttentionAlone(config, reason)


def why_plain(model: ModelSpecification, itemsize: int, block_size: int, shared: int) -> str:
    """Why torch's operations attend on a GPU where Triton works; empty: our kernels do. Arguments:
    see ``form_for_kernels``."""
    form = form_for_kernels(model, itemsize, block_size, shared)
    if isinstance(form, DenseConfig):
        return ""
    caches = [cache_of(layer) for layer in model.layers]
    alone = attention_for_kernels(
        caches, model.hidden_size, model.vocab_size, itemsize, block_size, shared
    )
    return f"{form}; attention: {alone}" if isinstance(alone, str) else ""


def attention_for_kernels(
    caches: Sequence[CacheSpecification],
    hidden: int,
    vocab: int,
    itemsize: int,
    block_size: int,
    shared: int | None = None,
) -> DenseConfig | str:
    """A model of which our kernels compute attention alone, or why not even that; arguments: see
    ``form_for_kernels`` and ``paged_config``."""
    # Sizes of the MLP are for plans alone: here a step is measured.
    config = paged_config(caches, hidden, 0, vocab)
    if isinstance(config, str):
        return f"the kernels lack {config}"
    return _unfit(config, itemsize, block_size, shared) or config


def form_for_kernels(
    model: ModelSpecification, itemsize: int, block_size: int, shared: int | None = None
) -> DenseConfig | str:
    """The model's form for our kernels, or why it has none; itemsize: bytes of a weight; shared:
    shared memory of a program in bytes, by default that of the current GPU."""
    config = dense_config(model)
    if isinstance(config, str):
        return f"the kernels lack {config}"
    return _unfit(config, itemsize, block_size, shared) or config


def _unfit(config: DenseConfig, itemsize: int, block_size: int, shared: int | None) -> str:
    """Why attention does not fit the GPU; empty if it does."""
    from penstock.kernels.gpu.device_facts import shared_bytes
    from penstock.kernels.gpu.prefill_attention import shape_for

    dim = config.head_dim
    if shape_for(dim, itemsize, shared_bytes() if shared is None else shared) is None:
        return (
            f"heads of {dim} with {itemsize} bytes a number need more shared memory than this "
            "device has"
        )
    if block_size & (block_size - 1):
        return f"blocks of {block_size}; the kernels take powers of two"
    return ""
