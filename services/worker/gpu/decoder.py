"""The decoder's forward pass on a CUDA device, in memory that is planned before the first step.

The same layers as ``penstock.services.worker.models.decoder``, in two parts: the *body* writes K
and V of every row and ends with the last layer's attention; the *head* does what is left of that
layer, makes logits and draws, all for sampled rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.gpu.attention_arguments import HeadInputs
from penstock.kernels.gpu.code_shapes import ROW_CLASSES
from penstock.kernels.gpu.slots import bring_forward, embed
from penstock.kernels.gpu.softcap import softcap
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.adapted_decoder import AdaptedDecoder
from penstock.services.worker.gpu.adapter_tiles import AdapterTiles
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.coded_products import choose_coded
from penstock.services.worker.gpu.compressed_layers import Compression, no_compression
from penstock.services.worker.gpu.drafted_rows import StepRows
from penstock.services.worker.gpu.drafting_executor import DraftingGpuExecutor
from penstock.services.worker.gpu.graph_sizes import GraphSizes, graph_sizes
from penstock.services.worker.gpu.kernel_choice import KernelChoice
from penstock.services.worker.gpu.kv_pool import KVPool
from penstock.services.worker.gpu.layer_attention import LayerAttention
from penstock.services.worker.gpu.layer_products import (
    BoundedProducts,
    FusedProducts,
    LayerProducts,
    LibraryProducts,
    choose_gated,
    choose_products,
)
from penstock.services.worker.gpu.static_memory import layer_operations
from penstock.services.worker.gpu.step_decoder import StepDecoder
from penstock.services.worker.gpu.workspace import Workspace, make_workspace
from penstock.services.worker.layer_groups import LayerGroups
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.models.dense import (
    DenseConfig,
    DenseWeights,
    caches_of,
    tables_of,
)
from penstock.services.worker.models.dense_form import half_tables

if TYPE_CHECKING:
    from penstock.kernels.gpu.gated_linear_hopper import HopperGatedLinear
    from penstock.services.worker.adapters.device_adapters import DeviceAdapters


class GpuDecoder(StepDecoder):
    """Weights, KV cache and workspace with a forward pass that allocates nothing."""

    may_wait = False
    space: Workspace
    attention_class: type[LayerAttention] = LayerAttention

    def __init__(
        self,
        config: DenseConfig,
        weights: DenseWeights,
        state: BatchState,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        max_rows: int,
        compressed: bool = False,
        grouped: LayerGroups | None = None,
        kind: KVCacheKind = "auto",
        kv_memory: Tensor | None = None,
    ) -> None:
        """compressed: whether steps of few rows read the layers' compressed weights; grouped, kind,
        kv_memory: see ``LayerAttention``."""
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.config, self.weights, self.state = config, weights, state
        self.vocab_size, self.num_kv_heads = config.vocab_size, config.num_kv_heads
        slots, eps = len(state.rows), config.rms_norm_eps
        self._quantized = weights.quantized
        self.space = make_workspace(config, max_rows, slots, dtype, device)
        stored = all(
            layer.query_norm is None or layer.query_norm.dtype == dtype for layer in weights.layers
        )
        with ThreadPoolExecutor(2, "compile") as beside:
            products = beside.submit(self._choose, eps, compressed)
            gated = beside.submit(self._choose_gated)
            self.attention = self.attention_class(
                state,
                self.space.attention,
                _head_inputs(config, weights, max_positions),
                caches_of(config),
                num_blocks,
                block_size,
                eps,
                "" if stored else "takes norms of heads in the type of the model",
                grouped,
                kind,
                kv_memory,
            )
        self.products, self.gated = products.result(), gated.result()
        if self.products.kernels:
            self.attention.least_rows = 1
        self._library = LibraryProducts(
            weights, self.space, eps, self.gated.kernels, config.activation
        )
        self._fused = FusedProducts(weights, self.space, eps, config.activation)
        # Rounded to the model's type, as where these models were trained.
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype).item()
        self._decode_tokens = torch.full((slots,), -1, dtype=torch.int32, device=device)

    def _choose(self, eps: float, compressed: bool) -> KernelChoice[BoundedProducts | None]:
        weights, space, activation = self.weights, self.space, self.config.activation
        if any(linear.quantized for layer in weights.layers for linear in layer.linears):
            with torch.inference_mode():
                return choose_coded(weights, space, eps, activation)
        return choose_products(weights, space, eps, compressed, activation)

    def _choose_gated(self) -> KernelChoice[HopperGatedLinear | None]:
        return choose_gated(self.weights, self.space, self.config.activation)

    @property
    def kv_pool(self) -> KVPool:
        return self.attention.pool

    @property
    def row_classes(self) -> Sequence[int]:
        return ROW_CLASSES if self._quantized else ()

    @property
    def summary(self) -> str:
        return (
            f"{self.attention.summary}; "
            f"layers of few rows by the {self.products.summary}; "
            f"gated products of many rows by the {self.gated.summary}"
        )

    @property
    def widened_room(self) -> tuple[int, int]:
        return self.attention.widened_room

    @property
    def shares_prefixes(self) -> bool:
        return self.attention.shares_prefixes

    def graph_sizes(self, most: int, max_rows: int) -> GraphSizes:
        return graph_sizes(most, max_rows, layer_operations(self.config), self.shares_prefixes)

    def body(
        self,
        rows: int,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool = False,
    ) -> None:
        """See ``StepDecoder``; the last layer up to its attention."""
        products = self.products_for(rows, mixed=isinstance(chunks, ChunkRows))
        self.body_by(products, rows, num_decode, chunks, shared)

    def body_by(
        self,
        products: LayerProducts,
        rows: int,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool,
    ) -> None:
        """``body`` with these products."""
        weights = self.weights
        self.attention.plan(num_decode, shared)
        tokens = self._decode_tokens[:rows] if chunks is None else chunks.tokens[:rows]
        self._embed(tokens, rows)
        products.begin(rows)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            products.qkv(index, rows)
            self.attention.attend(index, rows, num_decode, chunks, shared, layer.sinks)
            if index < last:
                self._behind_attention(products, index, rows)

    def _embed(self, tokens: Tensor, rows: int) -> None:
        """Write ``residual``."""
        state = self.state
        embed(
            self.weights.embedding, tokens, state.rows, state.last_token,
            self.space.residual[:rows], self._embedding_multiplier,
        )  # fmt: skip

    @staticmethod
    def _behind_attention(products: LayerProducts, layer: int, rows: int) -> None:
        products.output(layer, rows)
        products.gate_up(layer, rows)
        products.down(layer, rows)

    def products_for(self, rows: int, mixed: bool) -> LayerProducts:
        """The products for so many rows."""
        hopper, fused = self.products.kernels, self._fused
        if hopper and hopper.bounds[0] <= rows <= hopper.bounds[1]:
            return hopper
        most = min(1, fused.most_rows) if mixed else fused.most_rows
        return fused if rows <= most else self._library

    def head(self, count: int) -> None:
        self.head_by(self.products_for(count, mixed=False), count)

    def head_by(self, products: LayerProducts, count: int) -> None:
        """``head`` with these products."""
        space = self.space
        index = self.state.sample_index[:count]
        bring_forward(space.attention_output.flatten(1), space.residual, index)
        self._finish(products, count)
        hopper = self.products.kernels
        if hopper and hopper.head and count <= hopper.bounds[1]:
            hopper.head(0, count, space.logits[:count])
        else:
            self._make_logits(space.normed[:count], space.logits[:count])
        self._cap(space.logits[:count])

    def _make_logits(self, normed: Tensor, logits: Tensor) -> None:
        """Of as many rows, by the kernel for any number of them."""
        self.weights.lm_head.apply(normed, logits)

    def _cap(self, logits: Tensor) -> None:
        if self.config.logit_softcap:
            softcap(logits, self.config.logit_softcap)

    def head_of_all(self, rows: int, count: int) -> None:
        self.head_of_all_by(self.products_for(rows, mixed=True), rows, count)

    def head_of_all_by(self, products: LayerProducts, rows: int, count: int) -> None:
        """``head_of_all`` with these products."""
        space = self.space
        self._finish(products, rows)
        sampled = space.projected[:count]  # nothing of the layers is in it any more
        torch.index_select(space.normed, 0, self.state.sample_index[:count], out=sampled)
        self._make_logits(sampled, space.logits[:count])
        self._cap(space.logits[:count])

    def _finish(self, products: LayerProducts, rows: int) -> None:
        """The last layer behind its attention, and the final norm, for the first ``rows`` rows."""
        self._behind_attention(products, len(self.weights.layers) - 1, rows)
        products.end(rows)

    def row_logits(self, first: int, count: int) -> Tensor:
        logits = self.space.logits[:count]
        rows = self.space.normed[first : first + count]
        self._make_logits(rows, logits)
        self._cap(logits)
        return logits


def _head_inputs(
    config: DenseConfig, weights: DenseWeights, max_positions: int
) -> list[HeadInputs]:
    """For each layer; layers with the same rotary embedding have the same tables."""
    rotaries, device = tables_of(config), weights.embedding.device
    tables = {
        each: half_tables(each, config.head_dim, max_positions, device) for each in set(rotaries)
    }
    return [
        HeadInputs(*tables[rotary], layer.query_norm, layer.key_norm)
        for rotary, layer in zip(rotaries, weights.layers, strict=True)
    ]


def dense_executor(
    config: DenseConfig,
    weights: DenseWeights,
    capacity: EngineSizes,
    compression: Compression | None = None,
    kind: KVCacheKind = "auto",
    adapters: DeviceAdapters | None = None,
    decoder: type[GpuDecoder] = GpuDecoder,
    kv_memory: Tensor | None = None,
) -> DraftingGpuExecutor:
    """compression: of ``weights``; dropped where no kernel can read it; kind: of KV memory;
    adapters: of rows that ask for one; decoder: what computes the steps; kv_memory: see
    ``KVPool``."""
    compressed = compression or no_compression("nobody has asked for it")

    def make(state: BatchState, max_rows: int) -> GpuDecoder:
        made = decoder(
            config, weights, state, capacity.num_blocks + EXTRA_BLOCKS, capacity.block_size,
            capacity.max_model_len, max_rows, bool(compressed.linears), kind=kind,
            kv_memory=kv_memory,
        )  # fmt: skip
        kernels = made.products.kernels
        if kernels is None or not kernels.compressed:
            compressed.drop("no kernel for Hopper can read them here")
        return made

    executor = DraftingGpuExecutor(capacity, weights.embedding.device, make)
    if adapters is not None:
        _adapt(executor, adapters)
    executor.summary += f"; {compressed.summary}"
    return executor


def _adapt(executor: DraftingGpuExecutor, adapters: DeviceAdapters) -> None:
    """Let an executor compute rows with adapters."""
    decoder, max_rows = executor.decoder, executor.chunks.max_rows
    if not isinstance(decoder, GpuDecoder):
        raise TypeError(f"{type(decoder).__name__} takes no adapters")
    with torch.inference_mode():
        device = executor.chunks.slots.device
        tiles = AdapterTiles(executor.slots, max_rows, adapters.places, device)
        adapted = AdaptedDecoder(decoder, adapters, tiles, max_rows)
        executor.adapt(adapters.numbers, adapted, tiles)
    executor.summary += f"; {adapted.summary}"
