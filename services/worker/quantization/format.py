"""``Format``: how a checkpoint stores the weight of one linear layer, as a declaration.

It says which tensors there are, of which types and shapes, and in which form the weight is kept, so
that a checkpoint is checked and memory is planned without torch. ``weight`` makes the
``QuantizedWeight`` of the tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.kernels.quantized_kinds import Kind
from penstock.services.worker.safetensors_file import WEIGHT_TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.quantized_weight import QuantizedWeight

WEIGHT = ".weight"
Role = Literal["codes", "scales", "zeros", "order", "shape", "factor"]
"""What a tensor is; scales, factors, orders and shapes are looked at before memory is taken."""
_BITS = {"int4": 4, "fp4": 4, "int8": 8, "fp8": 8}


class Axis(msgspec.Struct, frozen=True):
    """What a dimension of a stored tensor counts."""

    of: Literal["outputs", "inputs"]
    numbers: int = 1
    """How many of these share …"""
    entries: int = 1
    """… so many entries of the dimension."""

    def entries_of(self, total: int, part: range, length: int) -> range:
        """Of a dimension of this length, what is there for ``part`` of ``total`` outputs or inputs:
        all where it is as long for any number of them, as one scale for all is."""
        if length != -(-total // self.numbers) * self.entries:
            return range(length)
        first, last = part.start // self.numbers, -(-part.stop // self.numbers)
        return range(first * self.entries, last * self.entries)


OUTPUTS, INPUTS = Axis("outputs"), Axis("inputs")


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor that a checkpoint holds for a format."""

    shapes: tuple[tuple[int, ...], ...]
    """Any of these."""
    types: tuple[str, ...]
    """Any of these, as safetensors files name them."""
    role: Role
    optional: bool = False
    group: int = 0
    """Of an order: inputs of a group."""
    says: tuple[int, ...] = ()
    """Of a shape: what it must be."""
    of: str = ""
    """What has decided on the shape, for errors."""
    axes: tuple[Axis, ...] = ()
    """Of its dimensions, by which a part of the layer has a part of the tensor; empty: it has all,
    and so where a dimension counts only one of outputs and inputs."""


class Form(msgspec.Struct, frozen=True):
    """How a weight is kept, for plans: see ``QuantizedWeight``."""

    kind: Kind
    group: int
    """Columns of a scale; 0: it has none but a factor for each row."""
    rows: int = 1
    scale_bytes: int = 4
    zeros: bool = False
    ordered: bool = False
    factor: bool = False
    offsets: bool = False

    def num_bytes(self, outputs: int, inputs: int) -> int:
        codes = outputs * inputs * _BITS[self.kind] // 8
        rest = 4 * outputs if self.factor or not self.group else 0
        rest += 8 * inputs if self.ordered else 0
        if self.group:
            groups = -(-inputs // self.group)
            rest += groups * -(-outputs // self.rows) * self.scale_bytes
            rest += groups * outputs * 2 if self.zeros else 0
            rest += groups * outputs * 4 if self.offsets else 0
        return codes + rest

    def computed_on_cpu(self, outputs: int) -> bool:
        """Whether torch's kernels for CPUs multiply it, as ``kernels.quantized_linear`` says. What
        they do not take is computed as a plain weight there."""
        if self.kind == "int8":
            return not self.group
        return self.kind == "int4" and self.group in (32, 64, 128, 256) and outputs % 16 == 0

    def cpu_bytes(self, outputs: int, inputs: int, item_bytes: int) -> int:
        """On a CPU; item_bytes: of a plain weight."""
        if not self.computed_on_cpu(outputs):
            return outputs * inputs * item_bytes
        held = self.num_bytes(outputs, inputs)
        if self.kind == "int8":
            return held
        # Once packed for few rows and once as read, for many.
        return held + outputs * inputs // 2 + 4 * outputs * (inputs // self.group)


class Format(msgspec.Struct, frozen=True):
    """Of one linear layer, or of one of the parts that are computed as one.

    Formats are data: layers that are stored alike have equal ones.
    """

    @property
    @abstractmethod
    def title(self) -> str:
        """``GPTQ, 4 bits in groups of 128``."""

    @property
    def quantizes_rows(self) -> bool:
        """Whether what has made the weights expects activations in codes of the same kind."""
        return False

    @abstractmethod
    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """By what follows the layer's name: ``.qweight``."""

    @abstractmethod
    def form(self, outputs: int, inputs: int) -> Form | None:
        """Of the weight, once it is read; ``None``: it is plain."""

    @abstractmethod
    def weight(
        self, tensors: Mapping[str, Tensor], outputs: int, inputs: int
    ) -> QuantizedWeight | Tensor:
        """Of tensors by the names of ``tensors``; optional ones may be missing. On their device,
        without rounding. The tensors may be overwritten."""

    def why_not(self, outputs: int, inputs: int) -> str:
        """Why a layer of this size cannot be stored so; empty if it can."""
        return ""

    def of_part(self, outputs: int, own: int) -> Format:
        """The format of ``own`` consecutive outputs, of a layer of ``outputs`` in this one."""
        return self


def groups_of(inputs: int, group: int) -> int:
    """Groups in so many inputs; group: -1 for one."""
    return 1 if group < 0 else -(-inputs // group)


def scales(
    *shapes: tuple[int, ...],
    of: str = "",
    role: Role = "scales",
    optional: bool = False,
    axes: tuple[Axis, ...] = (),
) -> StoredTensor:
    """A tensor of scales, of any float type."""
    return StoredTensor(shapes, WEIGHT_TYPES, role, optional, of=of, axes=axes)


def plain_tensor(outputs: int, inputs: int, group: int = 1) -> StoredTensor:
    """A weight that is stored as it is. group: inputs that a part has together."""
    axes = OUTPUTS, Axis("inputs", group, group)
    return StoredTensor(((outputs, inputs),), WEIGHT_TYPES, "codes", axes=axes)


def inputs_in(group: int, inputs: int) -> Axis:
    """Of groups; group: -1 for one."""
    return Axis("inputs", inputs if group < 0 else min(group, inputs))
