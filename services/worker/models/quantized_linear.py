"""``QuantizedLinear``: a linear layer whose weight is kept in codes.

What a checkpoint has of it is read part by part and becomes ``QuantizedWeight``, without rounding;
parts that are stored alike are one weight, as gate and up, others are computed side by side. On a
CPU weights are packed for its kernels, and those that have none become plain ones; on a GPU they
become words (``WordWeight``) where its fast kernels take them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.gpu.word_weight import WordWeight, why_not, word_weight
from penstock.kernels.quantized_linear import PackedWeight, pack_quantized, quantized_product
from penstock.kernels.quantized_weight import QuantizedWeight, joined, quantized
from penstock.kernels.two_level_linear import (
    TwoLevelWeight,
    two_level_product,
    two_level_weight,
)
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_shares import LinearShare, StoredPart, stored_parts
from penstock.services.worker.models.linear_specification import LinearSpecification
from penstock.services.worker.quantization.format import WEIGHT

if TYPE_CHECKING:
    from penstock.services.worker.rank_group import RankGroup

Piece = QuantizedWeight | WordWeight | PackedWeight | TwoLevelWeight | Linear
"""Some consecutive outputs; a plain part is a ``Linear`` of its own."""


class QuantizedLinear(Linear):
    """``weight`` is on the meta device: it tells shape and type of the plain one."""

    def __init__(
        self, specification: LinearSpecification, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Without a weight until ``take`` or ``draw``."""
        outputs, inputs = specification.outputs, specification.inputs
        bias = torch.empty(outputs, dtype=dtype, device=device) if specification.bias else None
        weight = torch.empty(outputs, inputs, dtype=dtype, device="meta")
        super().__init__(specification, weight, bias)
        self.quantized, self.device = True, device
        self.share: LinearShare | None = None
        """What is kept of the whole layer, if a rank has a part of it."""
        self.pieces: list[Piece] = []
        self.space: Tensor | None = None
        """What products of words share: see ``word_linear``."""
        self.quantizes = specification.quantizes_rows
        """Whether rows may be quantized as the weight is, where that is faster."""
        self.slow: dict[str, int] = {}
        """Why pieces have no words, and how many."""

    @property
    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return bias + sum(piece.num_bytes for piece in self.pieces)

    def named(self) -> dict[str, Tensor]:
        """What is read as it is: biases."""
        return {name: each for name, each in super().named().items() if not name.endswith(WEIGHT)}

    def stored_parts(self) -> list[StoredPart]:
        """What ``take`` makes the weight of."""
        share = self.share
        return stored_parts(self.specification if share is None else share.whole, share)

    def take(self, read: Iterable[tuple[StoredPart, Mapping[str, Tensor]]]) -> None:
        """Make the weight of what a checkpoint holds of ``stored_parts``: tensors by what follows
        the part's name."""
        parts: list[Piece] = []
        for part, tensors in read:
            size = len(part.outputs), len(part.inputs)
            form = part.format
            made = tensors[WEIGHT] if form is None else form.weight(tensors, *size)
            rows, columns = part.kept
            if (len(rows), len(columns)) != size and isinstance(made, Tensor):
                made = made[rows.start : rows.stop, columns.start : columns.stop]
            elif (len(rows), len(columns)) != size and isinstance(made, QuantizedWeight):
                made = made.part(rows, columns)
            if isinstance(made, Tensor):
                parts.append(plain_part(made.to(self.weight.dtype), part.name))
            else:
                parts.append(made)
        self.pieces = _joined(parts)

    @property
    def is_finite(self) -> bool:
        """Whether scales are, before they are packed."""
        coded = [piece for piece in self.pieces if isinstance(piece, QuantizedWeight)]
        return all(piece.is_finite for piece in coded)

    def draw(self, std: float, generator: torch.Generator) -> None:
        """Make a random weight, in the form that a checkpoint's would have."""
        specification, tensors = self.specification, {}
        for name, outputs in specification.stored.items():
            plain = torch.empty(outputs, specification.inputs, device=self.device)
            tensors[name] = plain.normal_(0.0, std, generator=generator)
        parts: list[Piece] = []
        for (name, plain), format in zip(tensors.items(), specification.formats, strict=True):
            form = None if format is None else format.form(*plain.shape)
            if form is None:
                parts.append(plain_part(plain.to(self.weight.dtype), name))
                continue
            # Where a scale has other columns than these kinds, plans differ by scales alone.
            kind = "fp8" if form.kind == "fp4" else form.kind
            group = form.group if kind == "int4" else 0
            parts.append(quantized(plain, kind, group))
        self.pieces = _joined(parts)

    def rows(self, outputs: Sequence[int]) -> Tensor:
        (piece,) = self.pieces
        if not isinstance(piece, QuantizedWeight):
            raise ValueError("a packed weight has no rows any more")
        return piece.reordered(torch.tensor(list(outputs))).dequantized()

    def multiply_by(self, factor: float) -> None:
        if factor == 1.0:
            return
        if self.bias is not None:
            self.bias.mul_(factor)
        for place, piece in enumerate(self.pieces):
            if isinstance(piece, QuantizedWeight):
                self.pieces[place] = piece.multiplied(factor)
            elif isinstance(piece, Linear):
                piece.multiply_by(factor)
            else:
                raise ValueError("a packed weight is not multiplied any more")

    def reorder(self, outputs: Tensor) -> None:
        """See ``Linear``; outputs stay among those of their part."""
        self._remember(outputs)
        if self.bias is not None:
            self.bias[: len(outputs)] = self.bias.index_select(0, outputs.to(self.device))
        for place, (first, last, piece) in enumerate(list(self._places())):
            own = outputs[first:last].cpu() - first
            if not len(own):
                continue
            rest = torch.arange(len(own), last - first)
            if isinstance(piece, QuantizedWeight):
                self.pieces[place] = piece.reordered(torch.cat((own, rest)))
            elif isinstance(piece, Linear):
                piece.reorder(own)
            else:
                raise ValueError("a packed weight is not reordered any more")

    def make_plain(self) -> None:
        for place, piece in enumerate(self.pieces):
            if isinstance(piece, QuantizedWeight):
                self.pieces[place] = plain_part(piece.dequantized(self.weight.dtype), "part")

    def pack(self) -> None:
        """For a CPU: what its kernels take is packed, all else becomes plain."""
        if self.device.type != "cpu":
            return
        pieces: list[Piece] = []
        while self.pieces:  # one plain weight at a time stands beside its codes
            piece = self.pieces.pop(0)
            if isinstance(piece, QuantizedWeight):
                piece = self._for_cpu(piece)
            if isinstance(piece, Linear):
                piece.pack()
            pieces.append(piece)
        self.pieces = pieces
        self.packed = all(not isinstance(piece, Linear) or piece.packed for piece in pieces)

    def take_words(self, space: Tensor) -> None:
        """For a GPU: codes that its fast kernels take become words, one piece after the other;
        ``slow`` says of the others why not. May be called again. space: see ``word_linear``."""
        self.space, self.slow = space, {}
        if not any(isinstance(piece, QuantizedWeight) for piece in self.pieces):
            return  # nor may there be a Triton
        from penstock.kernels.gpu.code_shapes import why_not_words

        never = why_not_words(self.weight.dtype)
        for place, piece in enumerate(self.pieces):
            if isinstance(piece, QuantizedWeight):
                reason = never or why_not(piece)
                if reason:
                    self.slow[reason] = self.slow.get(reason, 0) + 1
                else:
                    self.pieces[place] = word_weight(piece)

    @property
    def words(self) -> WordWeight | None:
        """The whole weight in words, if it has them."""
        first = self.pieces[0] if len(self.pieces) == 1 else None
        return first if isinstance(first, WordWeight) else None

    def _for_cpu(self, weight: QuantizedWeight) -> Piece:
        packed = two_level_weight(weight) or pack_quantized(weight)
        return packed or plain_part(weight.dequantized(self.weight.dtype), "part")

    def __call__(self, x: Tensor) -> Tensor:
        if self.device.type == "cpu":
            parts = [_cpu_product(piece, x) for piece in self.pieces]
            product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            return product if self.bias is None else product + self.bias
        out = torch.empty(len(x), self.specification.outputs, dtype=x.dtype, device=x.device)
        return self._write(x, out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return self._write(x, out)

    def apply_in_parts(self, x: Tensor, out: Tensor) -> Tensor:
        if self.words is None:
            return self.apply(x, out)
        return self._words_product(x, self.words, self.bias, out, divided=True)

    def _words_product(
        self,
        x: Tensor,
        weight: WordWeight,
        bias: Tensor | None,
        out: Tensor,
        *,
        divided: bool = False,
    ) -> Tensor:
        from penstock.kernels.gpu.word_linear import word_linear

        if self.space is None:
            raise ValueError("a weight in words has no memory for its products")
        return word_linear(
            x, weight, bias, out, self.space, quantizes=self.quantizes, divided=divided
        )

    def _write(self, x: Tensor, out: Tensor) -> Tensor:
        for first, last, piece in self._places():
            bias = None if self.bias is None else self.bias[first:last]
            own = out[:, first:last]
            if isinstance(piece, WordWeight):
                self._words_product(x, piece, bias, own)
            elif isinstance(piece, QuantizedWeight):
                _device_product(x, piece, bias, own)
            else:
                own.copy_(_cpu_product(piece, x))
                if bias is not None:
                    own.add_(bias)
        return out

    def _places(self) -> Iterator[tuple[int, int, Piece]]:
        """First and last output of each piece, and the piece."""
        first = 0
        for piece in self.pieces:
            if isinstance(piece, Linear):
                last = first + piece.specification.outputs
            else:
                weight = piece.weight if isinstance(piece, PackedWeight) else piece
                last = first + weight.shape[0]
            yield first, last, piece
            first = last


class SummedQuantizedLinear(QuantizedLinear):
    """See ``SummedLinear``."""

    def __init__(
        self,
        specification: LinearSpecification,
        dtype: torch.dtype,
        device: torch.device,
        ranks: RankGroup,
    ) -> None:
        super().__init__(specification, dtype, device)
        self.ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self.ranks.sum(super().__call__(x))

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return self.ranks.sum(super().apply(x, out))

    def apply_part(self, x: Tensor, out: Tensor) -> Tensor:
        """See ``SummedLinear``."""
        return super().apply(x, out)

    def apply_in_parts(self, x: Tensor, out: Tensor) -> Tensor:
        return self.apply(x, out)


class VocabularyQuantizedLinear(QuantizedLinear):
    """See ``VocabularyLinear``."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        outputs = self.specification.outputs
        if out.shape[1] == outputs:
            return super().apply(x, out)
        made = super().apply(x, x.new_zeros(len(x), outputs))
        return out.copy_(made[:, : out.shape[1]])


def plain_part(weight: Tensor, name: str) -> Linear:
    outputs, inputs = weight.shape
    return Linear(LinearSpecification(inputs, (outputs,), (name,)), weight)


def _joined(parts: list[Piece]) -> list[Piece]:
    """Neighbours as one where they can be."""
    found: list[Piece] = []
    for part in parts:
        last = found[-1] if found else None
        one = None
        if isinstance(last, QuantizedWeight) and isinstance(part, QuantizedWeight):
            one = joined((last, part))
        if one is None:
            found.append(part)
        else:
            found[-1] = one
    return found


def _cpu_product(piece: Piece, x: Tensor) -> Tensor:
    if isinstance(piece, PackedWeight):
        return quantized_product(x, piece)
    if isinstance(piece, TwoLevelWeight):
        return two_level_product(x, piece)
    if isinstance(piece, Linear):
        return piece(x)
    if isinstance(piece, WordWeight):
        raise ValueError("words of a weight are multiplied on GPUs alone")
    return torch.nn.functional.linear(x, piece.dequantized(x.dtype))


def _device_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    from penstock.kernels.gpu.quantized_linear import quantized_linear

    quantized_linear(x, weight, bias, out)
