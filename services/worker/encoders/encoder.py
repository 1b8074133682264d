"""An encoder computed from its specification, with torch's operations on rows without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, pad, relu, silu

from penstock.kernels.linear import padded_rows
from penstock.services.worker.encoders.attention import RelativeBias, RowAttention, attention_of
from penstock.services.worker.encoders.packed_rows import PackedRows
from penstock.services.worker.encoders.specification import EncoderSpecification, LayerKind
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LayerLinears

Tensors = Mapping[str, Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Norm:
    def __init__(self, tensors: Tensors, name: str, eps: float) -> None:
        self._weight, self._bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self._weight, self._bias, self._eps)


class _Layer:
    def __init__(
        self, model: EncoderSpecification, kind: LayerKind, tensors: Tensors, ahead: str
    ) -> None:
        """ahead: what stands ahead of the layer's names."""
        names = model.names
        self._kind, self._pre_norm, self._gated = kind, model.pre_norm, model.gated
        self._heads, self._dim = model.num_heads, model.head_dim
        self._linears = LayerLinears(*(Linear.of(each, tensors, ahead) for each in model.linears))
        for linear in self._linears:
            linear.pack()
        attention_norm = ahead + names.attention_norm
        self._attention_norm: Norm | None = None
        if f"{attention_norm}.weight" in tensors:
            self._attention_norm = Norm(tensors, attention_norm, model.eps)
        self._mlp_norm = Norm(tensors, ahead + names.mlp_norm, model.eps)
        self._activation, self._activate = model.activation, _ACTIVATIONS[model.activation]

    @property
    def linears(self) -> LayerLinears[Linear]:
        return self._linears

    def with_linears(self, changed: Callable[[Linear, str], Linear]) -> _Layer:
        """See ``Encoder.with_linears``."""
        found, (qkv, output, up, down) = copy(self), self._linears
        activation = "" if self._gated else self._activation
        found._linears = LayerLinears(
            changed(qkv, ""), changed(output, ""), changed(up, activation), changed(down, "")
        )
        if activation:
            found._activate = _as_it_is
        return found

    def __call__(self, x: Tensor, attention: RowAttention, rotation: Tensor | None) -> Tensor:
        if self._pre_norm:
            normed = x if self._attention_norm is None else self._attention_norm(x)
            x = self._linears.output.add_to(x, self._attended(normed, attention, rotation))
            return self._linears.down.add_to(x, self._wide(self._mlp_norm(x)))
        x = self._linears.output.add_to(x, self._attended(x, attention, rotation))
        x = x if self._attention_norm is None else self._attention_norm(x)
        return self._mlp_norm(self._linears.down.add_to(x, self._wide(x)))

    def _wide(self, x: Tensor) -> Tensor:
        up = self._linears.up(x)
        if not self._gated:
            return self._activate(up)
        gate, up = up.chunk(2, -1)
        return self._activate(gate) * up

    def _attended(self, x: Tensor, attention: RowAttention, rotation: Tensor | None) -> Tensor:
        fused = self._linears.qkv(x).view(len(x), 3, self._heads, self._dim)
        query, key, value = fused.unbind(1)
        if rotation is not None:
            query, key = _rotated(query, rotation), _rotated(key, rotation)
        return attention(query, key, value, self._kind).flatten(1)


class Encoder:
    """Hidden states of all rows of a step."""

    def __init__(self, model: EncoderSpecification, tensors: Tensors, base: str) -> None:
        """tensors: by their names in the checkpoint, in which ``base`` stands ahead of those of
        this part."""
        names = model.names
        self._model = model
        self._words = tensors[f"{base}{names.words}.weight"]
        self._positions = tensors.get(f"{base}{names.positions}.weight")
        self._segments = tensors.get(f"{base}{names.segments}.weight")
        self._norm = Norm(tensors, base + names.embedding_norm, model.eps)
        self._layers = [
            _Layer(model, kind, tensors, base + names.layer.format(number))
            for number, kind in enumerate(model.layers)
        ]
        self._final: Norm | None = None
        if names.final_norm:
            self._final = Norm(tensors, base + names.final_norm, model.eps)
        self._bias: RelativeBias | None = None
        if model.relative_buckets:
            self._bias = RelativeBias(tensors[f"{base}{names.relative}.weight"])

    @property
    def device(self) -> torch.device:
        return self._words.device

    @property
    def linears(self) -> LayerLinears[Linear]:
        """Of the first layer."""
        return self._layers[0].linears

    def with_linears(self, changed: Callable[[Linear, str], Linear]) -> Encoder:
        """The same encoder with what is made of the linear layers of its layers and of the name of
        the activation behind each, which is then left to it; empty: there is none."""
        found = copy(self)
        found._layers = [layer.with_linears(changed) for layer in self._layers]
        return found

    def __call__(self, rows: PackedRows) -> Tensor:
        """[N, hidden]."""
        count = len(rows.tokens)
        tokens, positions, segments = self._filled(rows)
        x = embedding(tokens, self._words)
        if self._positions is not None:
            x = x + embedding(positions + self._model.first_position, self._positions)
        if self._segments is not None:
            last = len(self._segments) - 1
            x = x + embedding(segments.clamp(max=last), self._segments)
        x = self._norm(x)
        attention = attention_of(rows, self._bias)
        rotations: dict[float, Tensor] = {}
        for layer, kind in zip(self._layers, self._model.layers, strict=True):
            rotation = None
            if kind.theta:
                if kind.theta not in rotations:
                    rotations[kind.theta] = self._rotation(positions, kind.theta)
                rotation = rotations[kind.theta]
            x = layer(x, attention, rotation)
        x = x if self._final is None else self._final(x)
        return x if len(x) == count else x[:count]

    def _filled(self, rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and segments with as many rows as the packed products of a step of this
        size have, so that these need not be filled up one by one."""
        found = rows.tokens, rows.positions, rows.segments
        count = len(rows.tokens)
        missing = padded_rows(count) - count
        if not missing or not self.linears.qkv.packed:
            return found
        tokens, positions, segments = (pad(one, (0, missing)) for one in found)
        return tokens, positions, segments

    def _rotation(self, positions: Tensor, theta: float) -> Tensor:
        """[2, N, 1, D] fp32: cosines and sines."""
        dim = self._model.head_dim
        steps = torch.arange(0, dim, 2, device=positions.device).float() / dim
        angles = positions[:, None].float() * theta**-steps
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        return torch.stack((angles.cos(), angles.sin()))


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """x: [N, heads, D]; elements i and i + D / 2 are a pair."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (wide * rotation[0] + turned * rotation[1]).to(x.dtype)
