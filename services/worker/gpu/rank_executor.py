"""Which executor a rank of a divided model has on a CUDA device."""

from __future__ import annotations

from typing import Any

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.compressed_layers import no_compression
from penstock.services.worker.gpu.rank_decoder import RankGpuDecoder, RankGpuExecutor
from penstock.services.worker.gpu.shared_draws import SharedDrawsExecutor
from penstock.services.worker.layer_groups import LayerGroups
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.models.dense import DenseConfig, DenseWeights


def rank_executor(
    config: DenseConfig,
    weights: DenseWeights,
    capacity: EngineSizes,
    ranks: Any,
    grouped: LayerGroups,
    kind: KVCacheKind = "auto",
) -> RankGpuExecutor:
    """grouped, kind: see ``RankGpuDecoder``."""

    def make(state: BatchState, max_rows: int) -> RankGpuDecoder:
        return RankGpuDecoder(
            config, weights, state, capacity.num_blocks + EXTRA_BLOCKS, capacity.block_size,
            capacity.max_model_len, max_rows, ranks, grouped, kind,
        )  # fmt: skip

    draws_with_others = ranks.place.is_last and ranks.place.shares > 1
    executor_class = SharedDrawsExecutor if draws_with_others else RankGpuExecutor
    executor = executor_class(capacity, weights.embedding.device, make, ranks)
    executor.summary += f"; {no_compression('the layers are divided among ranks').summary}"
    return executor
