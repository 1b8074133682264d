"""The decoder that Llama-like families share: its dimensions, weights and forward pass.

A layer is: RMSNorm, fused QKV projection, optional norm of each query and key head, rotary
embedding, paged attention, output projection, RMSNorm, fused gate and up projection, SiLU·mul,
down projection; each half adds to the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.attention import paged_attention
from penstock.kernels.attention_backend import PlannedBatch
from penstock.kernels.kv_cache import write_kv
from penstock.kernels.linear import Linear
from penstock.kernels.rms_norm import rms_norm, rms_norm_fp32, scaled_norm_weight
from penstock.kernels.rotary import RopeParameters, apply_rotary, cos_sin_table


class DecoderConfig(msgspec.Struct, frozen=True):
    """Dimensions and options of a dense decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class LayerWeights(msgspec.Struct):
    """One layer. Linear weights are [out, in]; an option that is off is ``None``."""

    input_norm: Tensor
    qkv: Tensor
    """[(Hq + 2 Hkv) * D, hidden]: queries, keys, values."""
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """[2 * I, hidden]: gate, up."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class DecoderWeights(msgspec.Struct):
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Tensor
    """[vocab, hidden]; the embedding itself when tied."""


def allocate_weights(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Uninitialized weights. On the meta device they cost nothing and tell the shapes."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def bias(present: bool, size: int) -> Tensor | None:
        return empty(size) if present else None

    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    fused = queries + 2 * config.num_kv_heads * config.head_dim
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(fused, hidden),
            qkv_bias=bias(config.qkv_bias, fused),
            query_norm=bias(config.qk_norm, config.head_dim),
            key_norm=bias(config.qk_norm, config.head_dim),
            output=empty(hidden, queries),
            output_bias=bias(config.output_bias, hidden),
            post_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            gate_up_bias=bias(config.mlp_bias, 2 * inner),
            down=empty(hidden, inner),
            down_bias=bias(config.mlp_bias, hidden),
        )
        for _ in range(config.num_layers)
    ]
    table = empty(config.vocab_size, hidden)
    head = table if config.tie_word_embeddings else empty(config.vocab_size, hidden)
    return DecoderWeights(table, layers, empty(hidden), head)


class StepInputs(NamedTuple):
    """One step on the device. N rows: decode rows, then chunks, then padding."""

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64."""
    slot_mapping: Tensor
    """[N] int64, see ``write_kv``."""
    attention: Sequence[PlannedBatch]
    sampled: Tensor | None
    """int64: the rows whose logits are wanted; ``None``: all."""


KVCache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, each [Hkv, num_blocks, block_size, D]."""


class _Layer:
    """One layer as it is computed: packed linears, norm weights in fp32."""

    def __init__(self, weights: LayerWeights, config: DecoderConfig) -> None:
        self.input_norm = scaled_norm_weight(weights.input_norm)
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.head_norm: Tensor | None = None
        """[Hq + Hkv, D]: of each query head, then of each key head."""
        if weights.query_norm is not None and weights.key_norm is not None:
            query = weights.query_norm.expand(config.num_heads, -1)
            key = weights.key_norm.expand(config.num_kv_heads, -1)
            self.head_norm = scaled_norm_weight(torch.cat((query, key)))
        self.output = Linear(weights.output, weights.output_bias)
        self.post_norm = scaled_norm_weight(weights.post_norm)
        self.gate_up = Linear(weights.gate_up, weights.gate_up_bias)
        self.down = Linear(weights.down, weights.down_bias)

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class Decoder:
    """Weights with a forward pass."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        """As loaded; ``prepare`` takes the layers and the LM head out of it."""
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._layers: list[_Layer] = []
        self._norm = self._cos = self._sin = torch.empty(0)
        self._lm_head: Linear | None = None

    def prepare(self, max_positions: int) -> None:
        """Make what ``forward`` needs for positions below ``max_positions``. May be called again.

        A layer's plain weights are dropped as soon as they are packed, so that both forms are in
        memory for one layer at a time.
        """
        if max_positions > len(self._cos):
            self._cos, self._sin = cos_sin_table(
                self.config.head_dim, max_positions, self.config.rope, self.device
            )
        if self._lm_head is not None:
            return
        weights = self.weights
        weights.layers.reverse()
        while weights.layers:
            self._layers.append(_Layer(weights.layers.pop(), self.config))
        self._norm = scaled_norm_weight(weights.norm)
        self._lm_head = Linear(weights.lm_head)
        weights.lm_head = torch.empty(0)

    @property
    def packed(self) -> bool:
        """Whether every linear layer is packed (see ``penstock.kernels.linear``)."""
        linears = [linear for layer in self._layers for linear in layer.linears()]
        return all(linear.packed for linear in (*linears, self._lm_head) if linear is not None)

    def forward(self, step: StepInputs, cache: KVCache) -> Tensor:
        """Write K and V of every row into the cache; return logits [len(step.sampled), vocab]."""
        return self.logits(self.hidden(step, cache, step.sampled), None)

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), vocab]: of some rows of what ``hidden`` returned; ``None``: of all."""
        if self._lm_head is None:
            raise RuntimeError("Decoder.prepare comes before Decoder.logits")
        return self._lm_head(self.last_hidden(hidden, rows))

    def last_hidden(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), hidden]: behind the last norm, of some rows of what ``hidden`` returned;
        ``None``: of all."""
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def hidden(self, step: StepInputs, cache: KVCache, rows: Tensor | None) -> Tensor:
        """Write K and V of every row into the cache; return the residual stream
        [len(rows), hidden] of some, ``None``: of all.

        The last layer behind its attention is computed for those only.
        """
        if self._lm_head is None:
            raise RuntimeError("Decoder.prepare comes before Decoder.hidden")
        eps = self.config.rms_norm_eps
        cos = self._cos.index_select(0, step.positions).unsqueeze(1)
        sin = self._sin.index_select(0, step.positions).unsqueeze(1)
        residual = embedding(step.tokens, self.weights.embedding)
        last = self._layers[-1]
        for layer, kv in zip(self._layers, cache, strict=True):
            x = rms_norm(residual, layer.input_norm, eps)
            mixed = self._attention(x, layer, kv, step, cos, sin)
            if layer is last and rows is not None:
                residual, mixed = residual.index_select(0, rows), mixed.index_select(0, rows)
            residual = layer.output.add_to(residual, mixed)
            x = rms_norm(residual, layer.post_norm, eps)
            residual = layer.down.add_to(residual, silu_and_mul(layer.gate_up(x)))
        return residual

    def _attention(
        self,
        x: Tensor,
        layer: _Layer,
        kv: tuple[Tensor, Tensor],
        step: StepInputs,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Attention before its output projection: [N, Hq * D]."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        fused = layer.qkv(x).view(len(x), heads + 2 * kv_heads, dim)
        turned, value = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
        if layer.head_norm is not None:
            turned = rms_norm_fp32(turned, layer.head_norm, config.rms_norm_eps)
        turned = apply_rotary(turned, cos, sin).to(self.dtype)
        query, key = turned[:, :heads], turned[:, heads:]
        write_kv(key, value, kv[0], kv[1], step.slot_mapping)
        return paged_attention(query, kv[0], kv[1], step.attention, dim**-0.5)
