"""Linear layers as data: sizes, parts, names in a checkpoint, and how one is divided.

Memory is planned from these without torch; ``linear`` makes layers of them.
"""

from __future__ import annotations

import itertools
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.services.worker.models.adapter import LLAMA_NAMES, TensorNames
from penstock.services.worker.models.specification import Layer, ModelSpecification
from penstock.services.worker.quantization.format import (
    WEIGHT,
    Form,
    Format,
    StoredTensor,
    plain_tensor,
)
from penstock.services.worker.quantization.quantization import Quantization

Item = TypeVar("Item")


class KeptPart(NamedTuple):
    """Some consecutive outputs of a linear layer."""

    outputs: int
    form: Form | None
    """``None``: plain."""


class LinearSpecification(msgspec.Struct, frozen=True):
    """y = x Wᵀ + b, W: [outputs, inputs], b: [outputs]."""

    inputs: int
    parts: tuple[int, ...]
    """Outputs of each part, in their order: of queries, keys and values; of gate and up."""
    names: tuple[str, ...]
    """What a checkpoint calls the parts, behind a prefix; one name: it has them in one piece."""
    bias: bool = False
    gated: bool = False
    """Whether the parts are gate and up: an activation behind it makes one number of two."""
    shard: Literal["outputs", "inputs"] = "outputs"
    """What is divided where several compute it: outputs, each part for itself; or inputs, and the
    results are summed."""
    formats: tuple[Format | None, ...] = ()
    """Of what is stored under each name, ``None``: plain. Empty: all is."""

    def quantized_by(self, quantization: Quantization | None, prefix: str) -> LinearSpecification:
        """The layer as it is stored, by its names behind a prefix."""
        if quantization is None:
            return self
        formats = tuple(quantization.format_of(prefix + name) for name in self.stored)
        return replace(self, formats=formats) if any(formats) else self

    @property
    def outputs(self) -> int:
        return sum(self.parts)

    @property
    def columns(self) -> int:
        """Numbers of a row behind the gate, if there is one."""
        return self.outputs // (2 if self.gated else 1)

    @property
    def num_parameters(self) -> int:
        return self.outputs * (self.inputs + self.bias)

    @property
    def stored(self) -> dict[str, int]:
        """Outputs of each name in a checkpoint."""
        if len(self.names) == 1:
            return {self.names[0]: self.outputs}
        return dict(zip(self.names, self.parts, strict=True))

    def num_bytes(self, item_bytes: int, *, on_cpu: bool) -> int:
        """Of the layer once it is loaded; item_bytes: of a plain weight and of the bias."""
        found = self.outputs * self.bias * item_bytes
        for outputs, form in self.kept:
            if form is None:
                found += outputs * self.inputs * item_bytes
            elif on_cpu:
                found += form.cpu_bytes(outputs, self.inputs, item_bytes)
            else:
                found += form.num_bytes(outputs, self.inputs)
        return found

    @property
    def kept(self) -> list[KeptPart]:
        """The weight once it is loaded: neighbours that are stored alike are one."""
        found = []
        parts = zip(self._formats, self.stored.values(), strict=True)
        for format, group in itertools.groupby(parts, lambda part: part[0]):
            outputs = sum(part[1] for part in group)
            form = None if format is None else format.form(outputs, self.inputs)
            found.append(KeptPart(outputs, form))
        return found

    @property
    def quantizes_rows(self) -> bool:
        """Whether rows may be quantized, too, as what made the weights expects."""
        return bool(self.formats) and all(
            each is not None and each.quantizes_rows for each in self.formats
        )

    @property
    def _formats(self) -> tuple[Format | None, ...]:
        return self.formats or (None,) * len(self.stored)

    def stored_tensors(self, prefix: str) -> dict[str, StoredTensor]:
        """What a checkpoint holds of the weight of a quantized layer, by the names there; none of a
        plain one."""
        found: dict[str, StoredTensor] = {}
        for (name, outputs), format in zip(self.stored.items(), self.formats, strict=False):
            shape = (outputs, self.inputs)
            if format is None:
                found[prefix + name + WEIGHT] = plain_tensor(*shape)
            else:
                tensors = format.tensors(*shape).items()
                found |= {prefix + name + kind: stored for kind, stored in tensors}
        return found

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Of the plain tensors that a checkpoint holds, by their names."""
        found: dict[str, tuple[int, ...]] = {}
        for name, outputs in self.stored.items():
            if not self.formats:
                found[f"{prefix}{name}.weight"] = (outputs, self.inputs)
            if self.bias:
                found[f"{prefix}{name}.bias"] = (outputs,)
        return found


class LayerLinears(NamedTuple, Generic[Item]):
    """One thing for each of a transformer layer's linear layers."""

    qkv: Item
    output: Item
    up: Item
    """Gate, then up; up alone if there is no gate."""
    down: Item


def layer_linears(
    layer: Layer, hidden: int, names: TensorNames = LLAMA_NAMES
) -> LayerLinears[LinearSpecification]:
    """hidden: the model's size; names: of its checkpoint."""
    attention, mlp = layer.attention, layer.mlp
    queries, keys = (
        heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)
    )
    ups = (mlp.width,) * (2 if mlp.gated else 1)
    return LayerLinears(
        LinearSpecification(hidden, (queries, keys, keys), names.qkv, attention.qkv_bias),
        LinearSpecification(
            queries, (hidden,), (names.output,), attention.output_bias, shard="inputs"
        ),
        LinearSpecification(hidden, ups, names.up, mlp.up_bias, mlp.gated),
        LinearSpecification(mlp.width, (hidden,), (names.down,), mlp.down_bias, shard="inputs"),
    )


def head_linear(model: ModelSpecification, names: TensorNames = LLAMA_NAMES) -> LinearSpecification:
    """The LM head, whose outputs are the vocabulary."""
    rows = model.table_rows if model.tie_word_embeddings else model.head_rows
    return LinearSpecification(model.hidden_size, (rows,), (names.lm_head,))


class ModelLinears(NamedTuple):
    """Of a whole model."""

    layers: list[LayerLinears[LinearSpecification]]
    head: LinearSpecification


def model_linears(
    model: ModelSpecification,
    names: TensorNames = LLAMA_NAMES,
    quantization: Quantization | None = None,
) -> ModelLinears:
    """Every linear layer as it is kept. An LM head that is the embedding is plain, unless weights
    are quantized while they are read."""
    layers = []
    for index, layer in enumerate(model.layers, model.first_layer):
        prefix = names.layer.format(index)
        linears = layer_linears(layer, model.hidden_size, names)
        layers.append(LayerLinears(*(each.quantized_by(quantization, prefix) for each in linears)))
    head = head_linear(model, names)
    own_head = quantization is not None and (quantization.online or not model.tie_word_embeddings)
    if own_head and model.predicts:
        head = head.quantized_by(quantization, "")
    return ModelLinears(layers, head)
