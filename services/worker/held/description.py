"""Describes a loaded model as data and tensors, and makes it again of them.

What is described is the model as it is computed: fused, reordered, multiplied, quantized, on a GPU
in the form of its kernels. Making it again reads ``config.json`` and nothing else of its folder,
and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.kernels.gpu.word_weight import WordWeight
from penstock.kernels.quantized_weight import QuantizedWeight
from penstock.services.worker.held.manifest import (
    BadManifest,
    HeldLayer,
    HeldLinear,
    HeldModel,
    HeldTuple,
)
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense import DenseLayer, DenseWeights
from penstock.services.worker.models.dense_form import DenseModel
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.quantized_linear import QuantizedLinear, plain_part
from penstock.services.worker.models.weight_words import give_words
from penstock.services.worker.models.weights import (
    DecoderWeights,
    LayerWeights,
    NormWeights,
    allocate_weights,
)
from penstock.services.worker.quantization.quantization import Quantization

_NORMS = ("input_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm")
_DENSE = tuple(name for name in DenseLayer.__struct_fields__ if name != "linears")
_PLAIN, _COMPRESSED = "plain", "compressed"
_CODED: dict[str, type[QuantizedWeight] | type[WordWeight]] = {
    "quantized": QuantizedWeight,
    "words": WordWeight,
}
_Tuple = TypeVar("_Tuple", bound=NamedTuple)


class CannotHold(Exception):
    """Says what cannot be described."""


class RestoredModel(NamedTuple):
    model: Decoder
    kernels: DenseModel | None
    compressed: list[Linear]
    """Linear layers that have a compressed weight, too."""


class Describer:
    """Numbers the tensors of a model, each once, in the order in which it meets them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def model(self, model: Decoder, kernels: DenseModel | None, compression: str) -> HeldModel:
        """kernels: the model in their form, if it has one. Raises ``CannotHold``."""
        weights: DecoderWeights | DenseWeights = model.weights
        layers = [self._layer(one) for one in model.weights.layers] if kernels is None else []
        if kernels is not None:
            weights = kernels.weights
            layers = [self._dense_layer(one) for one in kernels.weights.layers]
        norm = weights.norm
        tensors = {"embedding": weights.embedding}
        tensors |= _of_norm("norm", NormWeights(norm) if isinstance(norm, Tensor) else norm)
        return HeldModel(
            model.specification,
            model.weights.names,
            str(model.dtype).removeprefix("torch."),
            None if kernels is None else kernels.config,
            layers,
            self._all(tensors),
            self._linear(weights.lm_head),
            compression,
        )

    def _layer(self, layer: LayerWeights) -> HeldLayer:
        tensors: dict[str, Tensor] = {}
        for name in _NORMS:
            tensors |= _of_norm(name, getattr(layer, name))
        for name in ("query_norm", "key_norm", "sinks"):
            if (tensor := getattr(layer, name)) is not None:
                tensors[name] = tensor
        return HeldLayer([self._linear(one) for one in layer.linears], self._all(tensors))

    def _dense_layer(self, layer: DenseLayer) -> HeldLayer:
        tensors = {name: getattr(layer, name) for name in _DENSE}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return HeldLayer([self._linear(one) for one in layer.linears], self._all(given))

    def _linear(self, linear: Linear) -> HeldLinear:
        if linear.packed:
            raise CannotHold("packed weights")
        tensors = {} if linear.bias is None else {"bias": linear.bias}
        if not isinstance(linear, QuantizedLinear):
            each = linear.compressed
            compressed = None if each is None else self._tuple(_COMPRESSED, each)
            return HeldLinear(self._all(tensors | {"weight": linear.weight}), [], compressed)
        pieces = [self._piece(piece) for piece in linear.pieces]
        return HeldLinear(self._all(tensors), pieces)

    def _piece(self, piece: object) -> HeldTuple:
        if isinstance(piece, Linear):
            return HeldTuple(_PLAIN, self._all({"weight": piece.weight}), {})
        for kind, known in _CODED.items():
            if isinstance(piece, known):
                return self._tuple(kind, piece)
        raise CannotHold(f"weights as {type(piece).__name__}")

    def _tuple(self, kind: str, values: NamedTuple) -> HeldTuple:
        fields = {name: each for name, each in values._asdict().items() if each is not None}
        tensors = {name: each for name, each in fields.items() if isinstance(each, Tensor)}
        rest = {name: each for name, each in fields.items() if name not in tensors}
        return HeldTuple(kind, self._all(tensors), rest)

    def _all(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        return {name: self._number(name, tensor) for name, tensor in tensors.items()}

    def _number(self, name: str, tensor: Tensor) -> int:
        if not tensor.is_contiguous() or tensor.layout != torch.strided:
            raise CannotHold(f"{name} with gaps or in another layout")
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]


def _of_norm(name: str, norm: NormWeights | None) -> dict[str, Tensor]:
    if norm is None:
        return {}
    found = {f"{name}.weight": norm.weight}
    return found if norm.bias is None else found | {f"{name}.bias": norm.bias}


class Restorer:
    """The opposite of ``Describer``."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def model(self, held: HeldModel, quantization: Quantization | None) -> RestoredModel:
        """quantization: as the folder says, and the configuration. Raises ``BadManifest``."""
        dtype = getattr(torch, held.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise BadManifest(f"a type {held.dtype!r}")
        meta = torch.device("meta")
        weights = allocate_weights(held.specification, dtype, meta, held.names, quantization)
        if len(held.layers) != len(weights.layers):
            raise BadManifest(f"{len(held.layers)} layers of {len(weights.layers)}")
        try:
            return self._filled(held, weights)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadManifest(f"{type(error).__name__}: {error}") from None

    def _filled(self, held: HeldModel, weights: DecoderWeights) -> RestoredModel:
        weights.embedding = self._one(held.tensors["embedding"])
        linears = [weights.lm_head]
        self._fill(weights.lm_head, held.lm_head)
        for layer, own in zip(weights.layers, held.layers, strict=True):
            for linear, each in zip(layer.linears, own.linears, strict=True):
                self._fill(linear, each)
                linears.append(linear)
        compressed = [one for one in (*linears[1:], linears[0]) if one.compressed is not None]
        if held.dense is None:
            weights.norm = self._norm("norm", held.tensors) or weights.norm
            for layer, own in zip(weights.layers, held.layers, strict=True):
                self._decoder_layer(layer, own.tensors)
            return RestoredModel(Decoder(held.specification, weights), None, compressed)
        layers = [
            self._dense_layer(layer, own.tensors)
            for layer, own in zip(weights.layers, held.layers, strict=True)
        ]
        give_words(linears)  # they are there; this gives what their products share
        norm = self._one(held.tensors["norm.weight"])
        dense = DenseWeights(weights.embedding, layers, norm, weights.lm_head)
        model = Decoder(held.specification, weights)
        return RestoredModel(model, DenseModel(held.dense, dense), compressed)

    def _dense_layer(self, layer: LayerWeights, tensors: Mapping[str, int]) -> DenseLayer:
        fields: dict[str, Any] = dict.fromkeys(_DENSE) | self._named(tensors)
        return DenseLayer(layer.linears, **fields)

    def _decoder_layer(self, layer: LayerWeights, tensors: Mapping[str, int]) -> None:
        for name in _NORMS:
            setattr(layer, name, self._norm(name, tensors))
        for name in ("query_norm", "key_norm", "sinks"):
            setattr(layer, name, self._one(tensors[name]) if name in tensors else None)

    def _norm(self, name: str, tensors: Mapping[str, int]) -> NormWeights | None:
        if f"{name}.weight" not in tensors:
            return None
        bias = tensors.get(f"{name}.bias")
        weight = self._one(tensors[f"{name}.weight"])
        return NormWeights(weight, None if bias is None else self._one(bias))

    def _fill(self, linear: Linear, held: HeldLinear) -> None:
        tensors = self._named(held.tensors)
        _check_shape(linear.bias, tensors.get("bias"))
        linear.bias = tensors.get("bias")
        if isinstance(linear, QuantizedLinear):
            linear.device = self._device
            linear.pieces = [self._piece(piece) for piece in held.pieces]
            return
        _check_shape(linear.weight, tensors["weight"])
        linear.weight = tensors["weight"]
        if held.compressed is not None:
            from penstock.kernels.gpu.compressed_weights import CompressedWeight

            linear.compressed = self._tuple(CompressedWeight, held.compressed)

    def _piece(self, held: HeldTuple) -> QuantizedWeight | WordWeight | Linear:
        if held.kind == _PLAIN:
            return plain_part(self._one(held.tensors["weight"]), "part")
        if held.kind not in _CODED:
            raise BadManifest(f"a weight of the kind {held.kind!r}")
        return self._tuple(_CODED[held.kind], held)

    def _tuple(self, kind: type[_Tuple], held: HeldTuple) -> _Tuple:
        fields: dict[str, Any] = dict.fromkeys(kind._fields)
        make: Callable[..., _Tuple] = kind
        return make(**(fields | held.values | self._named(held.tensors)))

    def _named(self, tensors: Mapping[str, int]) -> dict[str, Tensor]:
        return {name: self._one(number) for name, number in tensors.items()}

    def _one(self, number: int) -> Tensor:
        if number < 0:
            raise BadManifest(f"tensor {number}")
        return self._tensors[number]


def _check_shape(expected: Tensor | None, found: Tensor | None) -> None:
    """Raises ``ValueError`` where a linear layer is another one than the model's."""
    if (expected is None) != (found is None):
        raise ValueError("a linear layer has a bias too many, or lacks one")
    if expected is not None and found is not None and expected.shape != found.shape:
        raise ValueError(f"a tensor [{tuple(found.shape)}] for one of {tuple(expected.shape)}")
