"""The decoder's forward pass on a CUDA device, in memory that is planned before the first step.

The same layers as ``penstock.services.worker.models.decoder``, in two parts, so that each can be a
graph of its own: the *body* writes K and V of every row and leaves the residual stream; the *head*
makes logits of the rows that are sampled, and draws.

The rows of a step: decode rows first, one a slot; then the tokens of chunks; then padding. What
the kernels must know of them lies on the device (``BatchState``, ``ChunkRows``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.gpu.decode_attention import decode_workspace
from penstock.kernels.gpu.draw import commit, draw
from penstock.kernels.gpu.few_rows_linear import MOST_ROWS, NARROW, few_rows_linear
from penstock.kernels.gpu.few_rows_linear import fits as fits_few_rows
from penstock.kernels.gpu.norm import add_rms_norm, rms_norm
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.shared_prefix import prefix_attention, shared_prefix
from penstock.kernels.gpu.skinny_linear import fits, skinny_linear
from penstock.kernels.gpu.slots import embed
from penstock.kernels.rotary import cos_sin_table
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.gpu.attention_choice import (
    TritonDecodeAttention,
    choose_decode_attention,
    choose_prefill_attention,
)
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.layer_products import LibraryProducts, choose_products
from penstock.services.worker.gpu.workspace import make_workspace
from penstock.services.worker.models.decoder import DecoderConfig, DecoderWeights, LayerWeights


def most_fused_rows(layer: LayerWeights, dtype: torch.dtype) -> int:
    """Up to how many rows of a step the layers' products include norms, gates and sums."""
    if dtype == torch.float16:
        return 0
    shapes = [weight.shape for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if not all(fits(width, columns) for columns, width in shapes):
        return 0
    few = layer.down.shape[1] % 16 == 0 and all(
        fits_few_rows(width, columns) for columns, width in shapes
    )
    if not few or dtype != torch.bfloat16:
        return 1
    return MOST_ROWS if layer.qkv.shape[1] < NARROW else 1


class GpuDecoder:
    """Weights, KV cache and workspace with a forward pass that allocates nothing."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        state: BatchState,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        max_rows: int,
    ) -> None:
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.config, self.weights, self.state = config, weights, state
        half = config.head_dim // 2
        cos, sin = cos_sin_table(config.head_dim, max_positions, config.rope, device)
        self._cos, self._sin = cos[:, :half].contiguous(), sin[:, half:].contiguous()
        slots = len(state.rows)
        self.space = make_workspace(config, max_rows, slots, dtype, device)
        self._prefix = shared_prefix(
            state.shared_slot, state.shared_length, slots, config.num_heads, config.num_kv_heads,
            config.head_dim,
        )  # fmt: skip
        shape = (config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        eps = config.rms_norm_eps
        split = decode_workspace(
            slots, config.num_heads, config.num_kv_heads, config.head_dim, device
        )
        self._prefixed = TritonDecodeAttention(self._keys, self._values, split, eps)
        self.decode = choose_decode_attention(
            self._keys, self._values, config.num_heads, slots, config.qk_norm, eps, self._prefixed
        )
        self.prefill = choose_prefill_attention(self._keys, self._values, config.num_heads)
        self._library = LibraryProducts(weights.layers, self.space)
        self.products = choose_products(weights.layers, self.space, self._library)
        ours = self.products.kernels
        self._fused_rows = min(most_fused_rows(weights.layers[0], dtype), ours.least_rows - 1)
        self._wide = config.hidden_size >= NARROW
        self._least_rows = self.decode.kernels.least_rows if self._fused_rows else 1
        """From so many decode rows on the chosen attention, below the Triton kernel."""
        self._decode_tokens = torch.full((slots,), -1, dtype=torch.int32, device=device)

    def body(
        self, rows: int, num_decode: int, chunks: ChunkRows | None, shared: bool = False
    ) -> None:
        """The layers for ``rows`` rows, of which the first ``num_decode`` may be decode rows.

        What ``BatchState.rows`` names is decoded; its padding costs next to nothing. Their
        attention is planned before all else: what the plan reads, rows and positions, changes
        between steps only, and so no layer's attention waits to read it. chunks: the step's chunk
        rows; ``None`` when all are decode rows. shared: read the prefix that the state
        names as shared once.
        """
        space, state, weights, config = self.space, self.state, self.weights, self.config
        residual, normed = space.residual[:rows], space.normed[:rows]
        if num_decode >= self._least_rows and not shared:
            self.decode.kernels.plan(state.rows[:num_decode], state.position)
        tokens = self._decode_tokens[:rows] if chunks is None else chunks.tokens[:rows]
        embed(weights.embedding, tokens, state.rows, state.last_token, residual)
        if rows <= (self._fused_rows if chunks is None else min(1, self._fused_rows)):
            for index in range(len(weights.layers)):
                self._fused_layer(index, rows, num_decode, chunks, shared)
            rms_norm(residual, weights.norm, config.rms_norm_eps, normed)
            return
        rms_norm(residual, weights.layers[0].input_norm, config.rms_norm_eps, normed)
        ours = self.products.kernels
        products = ours if rows <= ours.most_rows else self._library
        following = [layer.input_norm for layer in weights.layers[1:]]
        for index, layer in enumerate(weights.layers):
            products.qkv(index, rows)
            self._attend(index, rows, num_decode, chunks, shared)
            added = products.output(index, rows)
            add_rms_norm(added, residual, layer.post_norm, config.rms_norm_eps, normed)
            products.gated(index, rows)
            added = products.down(index, rows)
            norm = following[index] if index < len(following) else weights.norm
            add_rms_norm(added, residual, norm, config.rms_norm_eps, normed)

    def _fused_layer(
        self, index: int, rows: int, num_decode: int, chunks: ChunkRows | None, shared: bool
    ) -> None:
        """A layer for few rows: five kernels, the norms and sums inside the products."""
        layer, space, eps = self.weights.layers[index], self.space, self.config.rms_norm_eps
        residual, activated = space.residual[:rows], space.activated[:rows]
        qkv, mixed = space.qkv[:rows].view(rows, -1), space.mixed[:rows].view(rows, -1)
        one_row = rows == 1 and (self._wide or self._fused_rows == 1)
        linear = skinny_linear if one_row else few_rows_linear
        linear(residual, layer.qkv, layer.qkv_bias, qkv, norm_weight=layer.input_norm, eps=eps)
        self._attend(index, rows, num_decode, chunks, shared)
        linear(mixed, layer.output, layer.output_bias, residual, add=True)
        linear(
            residual, layer.gate_up, layer.gate_up_bias, activated,
            norm_weight=layer.post_norm, eps=eps, gated=True,
        )  # fmt: skip
        linear(activated, layer.down, layer.down_bias, residual, add=True)

    def _attend(
        self,
        index: int,
        rows: int,
        num_decode: int,
        chunks: ChunkRows | None,
        shared: bool = False,
    ) -> None:
        layer, space, state = self.weights.layers[index], self.space, self.state
        keys, values = self._keys[index], self._values[index]
        eps = self.config.rms_norm_eps
        if shared:
            prefix_attention(
                space.qkv[:num_decode], state.rows[:num_decode], state.position, self._prefix,
                state.table, self._cos, self._sin, layer.query_norm, keys, values, eps,
            )  # fmt: skip
        if num_decode:
            # First: its padding rows write zeros where chunk rows may be.
            attend: Callable[..., None]
            if shared:
                attend = partial(self._prefixed, prefix=self._prefix)
            elif num_decode < self._least_rows:
                attend = self._prefixed
            else:
                attend = self.decode.kernels
            attend(
                index, space.qkv[:num_decode], state.rows[:num_decode], state.position,
                state.table, self._cos, self._sin, layer.query_norm, layer.key_norm,
                space.mixed[:num_decode],
            )  # fmt: skip
        if chunks is not None:
            rope_and_cache(
                space.qkv[:rows], chunks.slots[:rows], chunks.positions[:rows], state.table,
                self._cos, self._sin, layer.query_norm, layer.key_norm, space.query[:rows],
                keys, values, eps,
            )  # fmt: skip
            self.prefill.kernels(
                index, space.query[:rows], chunks.tiles, chunks.num_tiles, state.table,
                space.mixed[:rows],
            )  # fmt: skip

    def head(self, count: int) -> None:
        """Logits of the ``count`` rows that ``BatchState.sample_index`` names."""
        space = self.space
        sampled = space.sampled[:count]
        torch.index_select(space.normed, 0, self.state.sample_index[:count], out=sampled)
        torch.mm(sampled, self.weights.lm_head.t(), out=space.logits[:count])

    def row_logits(self, first: int, count: int) -> Tensor:
        """Logits [count, V] of the step's rows from ``first`` on, no more than logits rows have
        memory; they are overwritten by the next."""
        logits = self.space.logits[:count]
        rows = self.space.normed[first : first + count]
        return torch.mm(rows, self.weights.lm_head.t(), out=logits)

    def draw(self, count: int) -> None:
        """Choose a token for each logits row, greedy or plainly drawn, and advance its slot."""
        space, state = self.space, self.state
        stretches = draw(
            space.logits[:count], state.sample_slots, state.temperature, state.seed_low,
            state.seed_high, state.num_output, space.best, space.token, GREEDY_TEMPERATURE,
        )  # fmt: skip
        self.commit(count, stretches)

    def commit(self, count: int, stretches: int) -> None:
        """Advance the slots by the tokens in ``best`` and ``token``."""
        space, state = self.space, self.state
        commit(
            space.best, space.token, state.sample_slots, state.last_token, state.position,
            state.num_output, space.result, count, stretches,
        )  # fmt: skip
