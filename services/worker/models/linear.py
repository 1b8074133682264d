"""``Linear``: one linear layer of a model, which owns its tensors and knows their forms.

A weight is read into one plain tensor, whatever pieces a checkpoint has it in. On a CPU that is
replaced by a packed one; on a GPU a compressed one may stand beside it, for steps of few rows.
What computes a layer takes tensors from here and nowhere else. ``QuantizedLinear`` is the same of
a weight that is kept in codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from penstock.kernels.linear import add_packed_linear, packed_linear, packed_weight
from penstock.services.worker.models.linear_specification import LinearSpecification

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.kernels.gpu.compressed_weights import CompressedWeight
    from penstock.services.worker.rank_group import RankGroup


class Linear:
    def __init__(
        self, specification: LinearSpecification, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        self.specification = specification
        self.weight = weight
        """[outputs, inputs]; once it is ``packed``, in a layout for ``packed_linear`` alone."""
        self.bias = bias
        """[outputs]."""
        self.packed = False
        self.quantized = False
        """Whether ``weight`` tells shape and type alone: see ``QuantizedLinear``."""
        self.compressed: CompressedWeight | None = None
        """The same weight, beside the plain one."""
        self.order: npt.NDArray[np.int64] | None = None
        """[n]: which of its first n outputs, as they are stored, stands at each place; ``None``: it
        was not reordered."""

    @classmethod
    def allocate(
        cls, specification: LinearSpecification, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        """Uninitialized; on the meta device without memory."""
        outputs, inputs = specification.outputs, specification.inputs
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        bias = torch.empty(outputs, dtype=dtype, device=device) if specification.bias else None
        return cls(specification, weight, bias)

    @classmethod
    def of(
        cls, specification: LinearSpecification, tensors: Mapping[str, Tensor], prefix: str
    ) -> Linear:
        """Of tensors by their names in a checkpoint, which begin with ``prefix``."""

        def joined(kind: str) -> Tensor:
            parts = [tensors[f"{prefix}{name}.{kind}"] for name in specification.names]
            return torch.cat(parts) if len(parts) > 1 else parts[0]

        return cls(specification, joined("weight"), joined("bias") if specification.bias else None)

    @property
    def num_bytes(self) -> int:
        """Of all forms of the weight and the bias."""
        compressed = 0 if self.compressed is None else self.compressed.num_bytes
        return self.weight.nbytes + compressed + (0 if self.bias is None else self.bias.nbytes)

    def named(self) -> dict[str, Tensor]:
        """Views of all that a checkpoint holds of it, by their names there."""
        stored = self.specification.stored
        found: dict[str, Tensor] = {}
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                parts = torch.split(tensor, list(stored.values()))
                found |= {f"{name}.{kind}": part for name, part in zip(stored, parts, strict=True)}
        return found

    def rows(self, outputs: Sequence[int]) -> Tensor:
        """The weight of some outputs, in fp32; before it is packed."""
        return self.weight[list(outputs)].float()

    def multiply_by(self, factor: float) -> None:
        """Multiply its results from now on."""
        for tensor in (self.weight, self.bias):
            if tensor is not None and factor != 1.0:
                tensor.mul_(factor)

    def reorder(self, outputs: Tensor) -> None:
        """Let its first outputs be those of these numbers, in this order; all of them are among the
        first."""
        self._remember(outputs)
        for tensor in (self.weight, self.bias):
            if tensor is not None:
                order = outputs.to(tensor.device)
                tensor[: len(outputs)] = tensor.index_select(0, order)

    def _remember(self, outputs: Tensor) -> None:
        order = outputs.cpu().numpy()
        self.order = order.copy() if self.order is None else self.order[order]

    def make_plain(self) -> None:
        """Leave codes for a plain weight, where it is quantized."""

    def pack(self) -> None:
        """Bring the weight into the layout in which this CPU is fastest, where it has one."""
        packed = packed_weight(self.weight)
        if packed is not None:
            self.weight, self.packed = packed, True

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, inputs] of the weight's type. Returns [N, outputs]."""
        if self.packed:
            return packed_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + self(x)`` in a new tensor. residual: [N, outputs]; x: [N, inputs]."""
        if self.packed:
            return add_packed_linear(residual, x, self.weight, self.bias)
        return linear(x, self.weight, self.bias).add_(residual)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        """Write ``self(x)`` to ``out`` [N, outputs], and return it; not for packed weights."""
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def apply_in_parts(self, x: Tensor, out: Tensor) -> Tensor:
        """Write ``self(x)`` to ``out`` [N, outputs] and return it. A layer whose product comes in
        parts leaves ``out`` as it is instead, and returns the parts [P, N, outputs] in fp32: their
        sum is the result, and the next product overwrites them."""
        return self.apply(x, out)


class SummedLinear(Linear):
    """A linear layer whose inputs are divided among ranks: each has some columns of the weight, and
    the results of all are summed. Its bias is zero on all ranks but the first."""

    def __init__(
        self,
        specification: LinearSpecification,
        weight: Tensor,
        bias: Tensor | None,
        ranks: RankGroup,
    ) -> None:
        super().__init__(specification, weight, bias)
        self.ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.ranks.sum(super().__call__(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return self.ranks.sum(super().apply(x, out))

    def apply_part(self, x: Tensor, out: Tensor) -> Tensor:
        """Write what this rank adds to the sum to ``out`` [N, outputs], and return it."""
        return super().apply(x, out)


class VocabularyLinear(Linear):
    """An LM head whose outputs are divided among ranks: each makes the logits of its own tokens.
    The last ranks may have rows of the weight for which there are no tokens; ``apply`` makes as
    many logits as ``out`` has columns."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, self.weight[: out.shape[1]].t(), out=out)
