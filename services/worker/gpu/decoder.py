"""The decoder's forward pass on a CUDA device, in memory that is planned before the first step.

The same layers as ``penstock.services.worker.models.decoder``, in two parts, so that each can be a
graph of its own: the *body* writes K and V of every row and ends with the last layer's attention;
the *head* does what is left of that layer, makes logits and draws, all for sampled rows only.

The rows of a step: decode rows first, one a slot; then the tokens of chunks; then padding. What
the kernels must know of them lies on the device (``BatchState``, ``ChunkRows``).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import (
    DecodeBatch,
    HeadInputs,
    LayerCache,
    Scores,
)
from penstock.kernels.gpu.decode_attention import decode_workspace
from penstock.kernels.gpu.draw import commit, draw
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.shared_prefix import SharedPrefix, shared_prefix
from penstock.kernels.gpu.slots import bring_forward, embed
from penstock.kernels.gpu.softcap import softcap
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.gpu.attention_choice import (
    TritonDecodeAttention,
    TritonPrefillAttention,
    choose_decode_attention,
    choose_prefill_attention,
    choose_prefix_attention,
)
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.compressed_layers import CompressedLayers
from penstock.services.worker.gpu.layer_products import (
    FusedProducts,
    LayerProducts,
    LibraryProducts,
    choose_gated,
    choose_products,
)
from penstock.services.worker.gpu.side_stream import SideStream
from penstock.services.worker.gpu.workspace import make_workspace
from penstock.services.worker.models.dense import DenseConfig, DenseWeights, tables_of
from penstock.services.worker.models.dense_form import half_tables


class GpuDecoder:
    """Weights, KV cache and workspace with a forward pass that allocates nothing."""

    def __init__(
        self,
        config: DenseConfig,
        weights: DenseWeights,
        state: BatchState,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        max_rows: int,
        compressed: CompressedLayers | None = None,
    ) -> None:
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.config, self.weights, self.state = config, weights, state
        self._heads = _head_inputs(config, weights, max_positions)
        """What the heads of each layer are rotated and normed with."""
        windows = config.windows or (0,) * config.num_layers
        self._attends_to_all = [not window for window in windows]
        slots = len(state.rows)
        self.space = make_workspace(config, max_rows, slots, dtype, device)
        shared = shared_prefix(
            state.shared_slot, state.shared_length, slots, config.num_heads, config.num_kv_heads,
            config.head_dim,
        )  # fmt: skip
        shape = (config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        scores = [Scores(config.score_scale, window, config.softcap) for window in windows]
        self._choose_kernels(scores, shared, compressed)
        self._library = LibraryProducts(
            weights, self.space, config.rms_norm_eps, self.gated.kernels, config.activation
        )
        self._fused = FusedProducts(weights, self.space, config.rms_norm_eps, config.activation)
        self._least_rows = 1 if self.products.kernels else self.decode.kernels.least_rows
        """The chosen attention runs from so many decode rows on, the Triton kernel below."""
        self._side = SideStream(device)
        # Rounded to the model's type, as where these models were trained.
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype).item()
        self._decode_tokens = torch.full((slots,), -1, dtype=torch.int32, device=device)

    def _choose_kernels(
        self, scores: list[Scores], shared: SharedPrefix, compressed: CompressedLayers | None
    ) -> None:
        """scores: of each layer; shared: what decode rows may share."""
        config, weights, space = self.config, self.weights, self.space
        slots, heads, eps = len(self.state.rows), config.num_heads, config.rms_norm_eps
        caches = self._keys, self._values
        split = decode_workspace(
            slots, heads, config.num_kv_heads, config.head_dim, self._keys.device
        )
        self._triton = TritonDecodeAttention(*caches, split, eps, shared, scores)
        self._windowed_prefill = TritonPrefillAttention(*caches, scores)
        stored = all(
            layer.query_norm is None or layer.query_norm.dtype == self._keys.dtype
            for layer in weights.layers
        )
        unfit = "" if stored else "takes norms of heads in the type of the model"
        # Side by side goes what shares no function: the hash by which Triton finds a kernel again
        # depends on whether a function that it calls was hashed before.
        with ThreadPoolExecutor(2, "compile") as beside:
            products = beside.submit(
                choose_products, weights, space, eps, compressed, config.activation
            )
            gated = beside.submit(choose_gated, weights, space, config.activation)
            self.decode = choose_decode_attention(
                *caches, heads, slots, config.qk_norm, eps, self._triton, shared, scores, unfit
            )
            self.prefix = choose_prefix_attention(
                *caches, heads, config.qk_norm, eps, shared, scores, unfit
            )
            self.prefill = choose_prefill_attention(*caches, space.query, scores)
        self.products, self.gated = products.result(), gated.result()

    @property
    def shares_prefixes(self) -> bool:
        """Whether a kernel can read a prefix once for all rows that share it."""
        return self.prefix.kernels is not None

    def body(
        self, rows: int, num_decode: int, chunks: ChunkRows | None, shared: bool = False
    ) -> None:
        """The layers for ``rows`` rows, of which the first ``num_decode`` may be decode rows; the
        last one up to its attention.

        What ``BatchState.rows`` names is decoded; its padding costs next to nothing. Their
        attention is planned before all else: what the plan reads, rows and positions, changes
        between steps only, and so no layer's attention waits to read it. chunks: the step's chunk
        rows; ``None`` when all are decode rows. shared: read the prefix that the state
        names as shared once; only where it ``shares_prefixes``.
        """
        state, weights = self.state, self.weights
        if num_decode >= self._least_rows:
            self.decode.kernels.plan(self._batch(num_decode), shared)
        tokens = self._decode_tokens[:rows] if chunks is None else chunks.tokens[:rows]
        embed(
            weights.embedding, tokens, state.rows, state.last_token, self.space.residual[:rows],
            self._embedding_multiplier,
        )  # fmt: skip
        products = self._products(rows, mixed=chunks is not None)
        products.begin(rows)
        last = len(weights.layers) - 1
        for index in range(len(weights.layers)):
            products.qkv(index, rows)
            self._attend(index, rows, num_decode, chunks, shared)
            if index < last:
                self._behind_attention(products, index, rows)

    @staticmethod
    def _behind_attention(products: LayerProducts, layer: int, rows: int) -> None:
        products.output(layer, rows)
        products.gate_up(layer, rows)
        products.down(layer, rows)

    def _products(self, rows: int, mixed: bool) -> LayerProducts:
        """The products for so many rows."""
        hopper, fused = self.products.kernels, self._fused
        if hopper and hopper.bounds[0] <= rows <= hopper.bounds[1]:
            return hopper
        most = min(1, fused.most_rows) if mixed else fused.most_rows
        return fused if rows <= most else self._library

    def _attend(
        self,
        index: int,
        rows: int,
        num_decode: int,
        chunks: ChunkRows | None,
        shared: bool = False,
    ) -> None:
        """Decode rows and chunk rows side by side: those read memory, these multiply."""
        decode = partial(self._attend_decode, index, num_decode, shared)
        if chunks is None:
            decode()
        elif not num_decode:
            self._attend_chunks(index, rows, chunks)
        else:
            self._side.run(decode, partial(self._attend_chunks, index, rows, chunks))

    def _attend_decode(self, index: int, num_decode: int, shared: bool) -> None:
        batch, heads, qkv = self._batch(num_decode), self._heads[index], self.space.qkv[:num_decode]
        if shared:
            if self.prefix.kernels is None:
                raise ValueError(f"no kernel reads shared prefixes: {self.prefix.reason}")
            self.prefix.kernels(index, qkv, batch, heads)
        fast = num_decode >= self._least_rows and self._attends_to_all[index]
        attend = self.decode.kernels if fast else self._triton
        attend(index, qkv, batch, heads, self.space.attention_output[:num_decode], shared)

    def _batch(self, num_decode: int) -> DecodeBatch:
        state = self.state
        return DecodeBatch(state.rows[:num_decode], state.position, state.table)

    def _attend_chunks(self, index: int, rows: int, chunks: ChunkRows) -> None:
        space, state = self.space, self.state
        last = index == len(self.weights.layers) - 1
        rope_and_cache(
            space.qkv[:rows], chunks.slots[:rows], chunks.positions[:rows], state.table,
            self._heads[index], space.query[:rows],
            LayerCache(self._keys[index], self._values[index]), self.config.rms_norm_eps,
        )  # fmt: skip
        attends_to_all = self._attends_to_all[index]
        attend = self.prefill.kernels if attends_to_all else self._windowed_prefill
        attend(
            index, space.query[:rows], chunks.last_tiles if last else chunks.tiles,
            chunks.num_tiles, state.table, space.attention_output[:rows],
        )  # fmt: skip

    def head(self, count: int) -> None:
        """After the body: logits of the ``count`` rows that ``BatchState.sample_index`` names."""
        space = self.space
        index = self.state.sample_index[:count]
        bring_forward(space.attention_output.flatten(1), space.residual, index)
        self._finish(count, mixed=False)
        hopper = self.products.kernels
        if hopper and hopper.head and count <= hopper.bounds[1]:
            hopper.head(0, count, space.logits[:count])
        else:
            torch.mm(space.normed[:count], self.weights.lm_head.t(), out=space.logits[:count])
        self._cap(space.logits[:count])

    def _cap(self, logits: Tensor) -> None:
        if self.config.logit_softcap:
            softcap(logits, self.config.logit_softcap)

    def head_of_all(self, rows: int, count: int) -> None:
        """As ``head``, for a step of which ``row_logits`` asks for other rows than the sampled.

        rows: those of the body.
        """
        space = self.space
        self._finish(rows, mixed=True)
        sampled = space.projected[:count]  # nothing of the layers is in it any more
        torch.index_select(space.normed, 0, self.state.sample_index[:count], out=sampled)
        torch.mm(sampled, self.weights.lm_head.t(), out=space.logits[:count])
        self._cap(space.logits[:count])

    def _finish(self, rows: int, mixed: bool) -> None:
        """The last layer behind its attention, and the final norm, for the first ``rows`` rows."""
        products = self._products(rows, mixed)
        self._behind_attention(products, len(self.weights.layers) - 1, rows)
        products.end(rows)

    def row_logits(self, first: int, count: int) -> Tensor:
        """After ``head_of_all``: logits [count, V] of the step's rows from ``first`` on, no more
        than logits rows have memory; they are overwritten by the next."""
        logits = self.space.logits[:count]
        rows = self.space.normed[first : first + count]
        torch.mm(rows, self.weights.lm_head.t(), out=logits)
        self._cap(logits)
        return logits

    def draw(self, count: int) -> None:
        """Choose a token for each logits row, greedy or plainly drawn, and advance its slot."""
        space, state = self.space, self.state
        splits = draw(
            space.logits[:count], state.sample_slots, state.temperature, state.seed_low,
            state.seed_high, state.num_output, space.best, space.token, GREEDY_TEMPERATURE,
        )  # fmt: skip
        self.commit(count, splits)

    def commit(self, count: int, splits: int) -> None:
        """Advance the slots by the tokens in ``best`` and ``token``."""
        space, state = self.space, self.state
        commit(
            space.best, space.token, state.sample_slots, state.last_token, state.position,
            state.num_output, space.result, count, splits,
        )  # fmt: skip


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
