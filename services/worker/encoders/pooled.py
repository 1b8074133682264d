"""From the states of a step's rows to one row of numbers for each prompt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu

from penstock.protocol.pooling import PoolingKind
from penstock.services.worker.encoders.encoder import Norm, Tensors
from penstock.services.worker.encoders.packed_rows import PackedRows
from penstock.services.worker.encoders.specification import EncoderSpecification
from penstock.services.worker.models.linear import Linear

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": relu,
    "gelu": gelu,
}


def pool(states: Tensor, rows: PackedRows, kind: PoolingKind) -> Tensor:
    """[prompts, hidden], in the order in which they are packed. states: [N, hidden]."""
    lengths = torch.tensor(rows.lengths, device=states.device)
    if kind in ("cls", "last"):
        ends = lengths.cumsum(0)
        return states.index_select(0, ends - 1 if kind == "last" else ends - lengths)
    return torch.segment_reduce(states.float(), kind, lengths=lengths, unsafe=True)


class Head:
    """The layers of a classifier behind pooling."""

    def __init__(
        self, model: EncoderSpecification, labels: int, tensors: Tensors, base: str
    ) -> None:
        self._steps: list[Callable[[Tensor], Tensor]] = []
        self._dtype = torch.float32
        for layer in model.head:
            prefix = base if layer.within_base else ""
            self._dtype = tensors[f"{prefix}{layer.name}.weight"].dtype
            if layer.kind == "norm":
                self._steps.append(Norm(tensors, prefix + layer.name, model.eps))
            else:
                linear = Linear.of(layer.linear(model.hidden_size, labels), tensors, prefix)
                linear.pack()
                self._steps.append(linear)
            if layer.activation:
                self._steps.append(_ACTIVATIONS[layer.activation])

    def __call__(self, pooled: Tensor) -> Tensor:
        """[prompts, labels]: logits. pooled: [prompts, hidden]."""
        pooled = pooled.to(self._dtype)
        for step in self._steps:
            pooled = step(pooled)
        return pooled
