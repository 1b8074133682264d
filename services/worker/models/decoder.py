"""A decoder computed from its specification, layer by layer, with torch's operations.

It runs on every device and is the reference for the kernels of GPUs. In fp32 on the CPU a row's
bits depend on nothing but its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock.kernels import activation
from penstock.kernels.layer_norm import layer_norm_fp32
from penstock.kernels.rms_norm import rms_norm_fp32, scaled_norm_weight
from penstock.kernels.rotary import apply_rotary, cos_sin_table
from penstock.services.worker.models.causal_model import StepInputs
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LayerLinears
from penstock.services.worker.models.sizes import num_parameters
from penstock.services.worker.models.specification import (
    Attention,
    CacheSpecification,
    Layer,
    ModelSpecification,
    Norm,
    Rotary,
    cache_of,
)
from penstock.services.worker.models.weight_words import give_words
from penstock.services.worker.models.weights import (
    DecoderWeights,
    LayerWeights,
    NormWeights,
)

if TYPE_CHECKING:
    from penstock.services.worker.adapters.adapted_linear import AdaptedLinear, Product
    from penstock.services.worker.adapters.model_adapters import ModelAdapters

Tables = dict[Rotary | None, tuple[Tensor, Tensor]]
"""Cosines and sines of each rotary embedding: see ``cos_sin_table``."""


class _Norm:
    def __init__(self, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> None:
        self._eps = norm.eps
        wide = weight.float() + 1.0 if norm.plus_one else weight.float()
        self._rms = norm.kind == "rms"
        self._weight = scaled_norm_weight(wide) if self._rms else wide
        self._bias = None if bias is None else bias.float()

    def fp32(self, x: Tensor) -> Tensor:
        if self._rms:
            return rms_norm_fp32(x, self._weight, self._eps)
        return layer_norm_fp32(x, self._weight, self._bias, self._eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.fp32(x).to(x.dtype)


class _QueryKeyNorm:
    """Of queries and keys, as ``Attention.qk_norm_over`` says."""

    def __init__(self, attention: Attention, norm: Norm, query: Tensor, key: Tensor) -> None:
        self._heads = attention.num_heads
        self._whole = attention.qk_norm_over == "all"
        if self._whole:
            self._parts = [_Norm(norm, query), _Norm(norm, key)]
            return
        dim = attention.head_dim
        weight = torch.cat(
            (query.expand(self._heads, dim), key.expand(attention.num_kv_heads, dim))
        )
        self._parts = [_Norm(norm, weight)]

    def __call__(self, query_key: Tensor) -> Tensor:
        """query_key: [N, Hq + Hkv, D]. Returns the same in fp32."""
        if not self._whole:
            return self._parts[0].fp32(query_key)
        halves = query_key[:, : self._heads], query_key[:, self._heads :]
        normed = [
            norm.fp32(half.flatten(1)).view(half.shape)
            for norm, half in zip(self._parts, halves, strict=True)
        ]
        return torch.cat(normed, 1)


def norm_of(norm: Norm | None, weights: NormWeights | None) -> _Norm | None:
    if norm is None or weights is None:
        return None
    return _Norm(norm, weights.weight, weights.bias)


class DecoderLayer:
    """One layer as it is computed: its linear layers packed, norm weights in fp32."""

    def __init__(
        self,
        layer: Layer,
        weights: LayerWeights,
        products: LayerLinears[AdaptedLinear] | None = None,
    ) -> None:
        """products: of its linear layers; by default they themselves."""
        attention, mlp = layer.attention, layer.mlp
        self.attention = attention
        self.linears = weights.linears
        for linear in self.linears:
            linear.pack()
        self.products: LayerLinears[Product] = LayerLinears(*(products or weights.linears))
        """What computes them."""
        self.activate = (activation.gated if mlp.gated else activation.plain)(mlp.activation)
        self.input_norm = norm_of(layer.input_norm, weights.input_norm)
        self.mlp_norm = norm_of(layer.mlp_norm, weights.mlp_norm)
        self._output_norm = norm_of(layer.attention_output_norm, weights.attention_output_norm)
        self._down_norm = norm_of(layer.mlp_output_norm, weights.mlp_output_norm)
        self._multiplier = layer.residual_multiplier
        self.sinks = weights.sinks
        self.parallel = layer.parallel
        self.head_norm: _QueryKeyNorm | None = None
        query, key = weights.query_norm, weights.key_norm
        if attention.qk_norm is not None and query is not None and key is not None:
            self.head_norm = _QueryKeyNorm(attention, attention.qk_norm, query, key)

    def query_key_value(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, Hq, D], keys and values [N, Hkv, D] of normed rows x. tables: those
        of the rows' positions, [N, 1, D] each."""
        part = self.attention
        heads, kv_heads, dim = part.num_heads, part.num_kv_heads, part.head_dim
        fused = self.products.qkv(x).view(len(x), heads + 2 * kv_heads, dim)
        query_key, value = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
        if self.head_norm is not None:
            query_key = self.head_norm(query_key)
        if part.rotary is not None:
            query_key = _rotate(query_key, part.rotary.dim, *tables[part.rotary])
        query_key = query_key.to(x.dtype)
        return query_key[:, :heads], query_key[:, heads:], value

    def add_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self._add(residual, self.products.output, attended, self._output_norm)

    def add_mlp(self, residual: Tensor, x: Tensor) -> Tensor:
        up = self.activate(self.products.up(x))
        return self._add(residual, self.products.down, up, self._down_norm)

    def _add(self, residual: Tensor, linear: Product, x: Tensor, norm: _Norm | None) -> Tensor:
        if norm is None and self._multiplier == 1.0:
            return linear.add_to(residual, x)
        product = linear(x)
        if norm is not None:
            product = norm(product)
        return residual + product * self._multiplier


class Decoder:
    """A ``CausalModel`` of weights and their specification."""

    def __init__(self, specification: ModelSpecification, weights: DecoderWeights) -> None:
        self.specification = specification
        self.weights = weights
        """As loaded; ``prepare`` packs the linear layers and takes the layers out of it."""
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.vocab_size = specification.vocab_size
        self.hidden_size = specification.hidden_size
        self.num_parameters = num_parameters(specification)
        self.caches: list[CacheSpecification] = [cache_of(each) for each in specification.layers]
        self.adapters: ModelAdapters | None = None
        """To be set before ``prepare``; ``None``: no row has one."""
        self.captured_layers: frozenset[int] = frozenset()
        """Numbers of layers, none by default, of which ``hidden`` keeps …"""
        self.captured: dict[int, Tensor] = {}
        """… the residual stream ahead of them, [N, hidden] of all rows of the latest step."""
        self._layers: list[DecoderLayer] = []
        self._norm: _Norm | None = None
        self._lm_head: Linear | None = None
        self._tables: Tables = {}
        self._max_positions = 0
        # Rounded to the model's type, as where these models were trained.
        self._embedding_multiplier = torch.tensor(
            specification.embedding_multiplier, dtype=self.dtype
        ).item()
        self._embedding: Callable[[Tensor], Tensor] = partial(embedding, weight=weights.embedding)
        """Rows [N, hidden] of tokens [N]."""

    def prepare(self, max_positions: int) -> None:
        """Make what ``hidden`` needs for positions below ``max_positions``. May be called again.

        Both forms of a weight, plain and packed, are in memory for one linear layer at a time.
        """
        layers = self.specification.layers
        if max_positions > self._max_positions:
            self._max_positions = max_positions
            self._tables = {
                rotary: cos_sin_table(rotary.dim, max_positions, rotary.parameters, self.device)
                for rotary in {layer.attention.rotary for layer in layers}
                if rotary is not None
            }
        if self._lm_head is not None:
            return
        weights = self.weights
        if self.device.type != "cpu":
            give_words(self.linears())
        adapters = self.adapters
        products = [None] * len(layers) if adapters is None else adapters.layers
        parts = zip(layers, weights.layers, products, strict=True)
        self._layers = [DecoderLayer(*each) for each in parts]
        weights.layers.clear()  # nobody needs their norms any more
        self._norm = norm_of(self.specification.norm, weights.norm)
        if self.specification.predicts:
            weights.lm_head.pack()
        self._lm_head = weights.lm_head

    @property
    def packed(self) -> bool:
        """Whether every linear layer is packed (see ``penstock.kernels.linear``)."""
        return self._lm_head is not None and all(linear.packed for linear in self.linears())

    @property
    def quantized(self) -> bool:
        return any(linear.quantized for linear in self.linears())

    def make_plain(self) -> None:
        """Make plain weights of quantized ones, one linear layer after the other."""
        for linear in self.linears():
            linear.make_plain()

    @property
    def weight_bytes(self) -> int:
        """Of all weights, linear layers in the forms that they have now."""
        item, plain, found = self.dtype.itemsize, self.num_parameters, 0
        for linear in self.linears():
            own = linear.specification.num_parameters
            plain -= 0 if linear is self.weights.lm_head and self._tied else own
            found += linear.num_bytes
        if self._tied and self.weights.lm_head.weight is self.weights.embedding:
            found -= self.weights.lm_head.num_bytes
        return plain * item + found

    @property
    def _tied(self) -> bool:
        return self.specification.tie_word_embeddings

    def linears(self) -> Iterator[Linear]:
        """All linear layers, the LM head last."""
        layers = self._layers or self.weights.layers
        for layer in layers:
            yield from layer.linears
        yield self.weights.lm_head

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), vocab]: of some rows of what ``hidden`` returned; ``None``: of all."""
        if self._lm_head is None:
            raise RuntimeError("Decoder.prepare comes before Decoder.logits")
        logits = self._lm_head(self.last_hidden(hidden, rows))
        multiplier, cap = self.specification.logit_multiplier, self.specification.logit_softcap
        if multiplier != 1.0:
            logits = logits.mul_(multiplier)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def last_hidden(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[len(rows), hidden]: behind the last norm, of some rows of what ``hidden`` returned;
        ``None``: of all."""
        if self._norm is None:
            raise RuntimeError("Decoder.prepare comes before Decoder.last_hidden")
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return self._norm(hidden)

    def hidden(self, step: StepInputs, rows: Tensor | None) -> Tensor:
        """Write K and V of every row into the cache; return the residual stream
        [len(rows), hidden] of some, ``None``: of all.

        The last layer behind its attention is computed for those only.
        """
        if self._lm_head is None:
            raise RuntimeError("Decoder.prepare comes before Decoder.hidden")
        tables: Tables = {
            rotary: (rows_at(cos, step.positions), rows_at(sin, step.positions))
            for rotary, (cos, sin) in self._tables.items()
        }
        residual = self._embedding(step.tokens)
        if self._embedding_multiplier != 1.0:
            residual = residual * self._embedding_multiplier
        last, adapters = self._layers[-1], self.adapters
        if adapters is not None:
            adapters.step.groups = step.adapters.all
            if self.specification.embeds:
                adapters.put_virtual(residual, step.adapters.virtual)
        if self.captured_layers:
            self.captured = {}
        for number, layer in enumerate(self._layers):
            if number in self.captured_layers:
                self.captured[number] = residual
            x = residual if layer.input_norm is None else layer.input_norm(residual)
            query, key, value = layer.query_key_value(x, tables)
            attended = step.attention(number, query, key, value, layer.sinks)
            if layer is last and rows is not None:
                residual, attended = residual.index_select(0, rows), attended.index_select(0, rows)
                x = x.index_select(0, rows) if layer.parallel else x
                if adapters is not None:
                    adapters.step.groups = step.adapters.sampled
            summed = layer.add_attention(residual, attended)
            if not layer.parallel:
                x = residual = summed
            if layer.mlp_norm is not None:
                x = layer.mlp_norm(residual)
            residual = layer.add_mlp(summed, x)
        return residual


def rows_at(table: Tensor, positions: Tensor) -> Tensor:
    """[N, 1, D]: the rows of these positions."""
    return table.index_select(0, positions).unsqueeze(1)


def _rotate(x: Tensor, dim: int, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [N, H, D], of which the first ``dim`` elements of each head are rotated; in fp32."""
    if dim == x.shape[-1]:
        return apply_rotary(x, cos, sin)
    return torch.cat((apply_rotary(x[..., :dim], cos, sin), x[..., dim:].float()), -1)
