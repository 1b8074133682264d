"""A model on its device, and what computes it there: kernels for GPUs or torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.protocol.wire.messages.engine import EngineSizes, LayerGroup
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.memory_plan import block_bytes
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_shape import BY_TRANSFORMERS
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import caches_of, dense_config
from penstock.services.worker.models.dense_form import DenseModel, dense_model
from penstock.services.worker.models.specification import CacheSpecification
from penstock.services.worker.plain_attention import REFERENCE, PlainAttention

if TYPE_CHECKING:
    from penstock.services.worker.gpu.compressed_layers import Compression
    from penstock.services.worker.step_profile import AnyExecutor


class LoadedModel(NamedTuple):
    """A model, and what computes it."""

    model: CausalModel
    kernels: DenseModel | str
    """``kernels_for`` it."""
    attention: PlainAttention = REFERENCE
    """If it has no kernels."""
    compression: Compression | None = None
    """If it has."""

    def executor(self, capacity: EngineSizes) -> AnyExecutor:
        if isinstance(self.kernels, str):
            return ModelExecutor(self.model, capacity, self.attention)
        from penstock.services.worker.gpu.executor import GpuExecutor

        return GpuExecutor(*self.kernels, capacity, self.compression)

    @property
    def caches(self) -> Sequence[CacheSpecification]:
        """What each layer keeps."""
        return (
            self.model.caches if isinstance(self.kernels, str) else caches_of(self.kernels.config)
        )

    @property
    def groups(self) -> list[LayerGroup]:
        """Groups of layers with a block table each; our kernels for GPUs know of one."""
        return group_layers(self.caches).groups

    @property
    def compressed(self) -> bool:
        """Whether its weights are there compressed, too."""
        return self.compression is not None and self.compression.layers is not None

    def block_bytes(self, block_size: int) -> int:
        """K and V of one block, which holds the layers of a group."""
        return block_bytes(self.caches, block_size, self.model.dtype.itemsize)


def kernels_for(model: CausalModel, block_size: int) -> DenseModel | str:
    """The model in the form of our kernels for GPUs, or why it is computed without them.

    Its weights are in that form from then on.
    """
    if model.device.type == "cpu":
        return "computed on a CPU"
    if not isinstance(model, Decoder):
        return BY_TRANSFORMERS
    config = dense_config(model.specification)
    if isinstance(config, str):
        return f"the kernels lack {config}"
    from penstock.kernels.gpu.prefill_attention import shape_for, shared_bytes

    dim = config.head_dim
    if shape_for(dim, model.dtype.itemsize, shared_bytes()) is None:
        return f"heads of {dim} in {model.dtype} need more shared memory than this device has"
    if block_size & (block_size - 1):
        return f"blocks of {block_size}; the kernels take powers of two"
    return dense_model(config, model.specification, model.weights)
