"""A model with random weights by which attention that is wrong shows, on a GPU."""

from __future__ import annotations

import torch

from penstock.kernels.rotary import RopeParameters
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.compressed_layers import Compression
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.models.dense import (
    DenseConfig,
    DenseWeights,
)
from penstock.services.worker.models.dense_form import allocate_dense

CONFIG = DenseConfig(
    512, 512, 2, 8, 2, 128, 512, 1e-6, RopeParameters(1e4), False, qk_norm=True,
)  # fmt: skip


def sharp_weights() -> DenseWeights:
    """Random weights by which each query attends to few keys, so that wrong ones show."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = allocate_dense(CONFIG, torch.bfloat16, torch.device("cuda"))

    def fill(tensor: torch.Tensor | None, value: float) -> None:
        if tensor is None:
            return
        if tensor.dim() == 1:
            tensor.fill_(value)
        else:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)

    for layer in weights.layers:
        for linear in layer.linears:
            fill(linear.weight, 1.0)
        for norm in (layer.input_norm, layer.post_norm):
            fill(norm, 1.0)
        for head_norm in (layer.query_norm, layer.key_norm):
            fill(head_norm, 1.7)
    weights.embedding.normal_(0.0, 1.0, generator=generator)
    fill(weights.lm_head.weight, 1.0)
    fill(weights.norm, 1.0)
    return weights


def executor_of(
    weights: DenseWeights,
    slots: int,
    warm: bool = True,
    compression: Compression | None = None,
) -> GpuExecutor:
    capacity = EngineSizes(900, 16, slots, 4096, 4096, CONFIG.vocab_size)
    executor = dense_executor(CONFIG, weights, capacity, compression)
    if warm:
        executor.warm_up()
    return executor
