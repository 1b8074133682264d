"""Linear layers as data: sizes, parts, names in a checkpoint, and how one is divided.

Memory is planned from these without torch; ``linear`` makes layers of them.
"""

from __future__ import annotations

from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from penstock.services.worker.models.adapter import LLAMA_NAMES, TensorNames
from penstock.services.worker.models.specification import Layer, ModelSpecification

Item = TypeVar("Item")


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

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a checkpoint holds, by their names."""
        found: dict[str, tuple[int, ...]] = {}
        for name, outputs in self.stored.items():
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
