"""Reads the weights of a quantized model, or quantizes plain ones while they are read.

Layer after layer: what files hold of a layer's weights is read into memory of its own, becomes the
layer's ``QuantizedWeight`` and is given back. So beside the model one layer is in memory twice, as
stored and as kept, whatever the format. A rank reads its part of each tensor (``stored_parts``).
What can be wrong with scales is found before (``stored_values``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.file_slices import FileSlice, slices_of
from penstock.services.worker.load_report import LoadReport, ReadProgress
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_shares import StoredPart
from penstock.services.worker.models.quantized_linear import QuantizedLinear
from penstock.services.worker.models.weights import DecoderWeights
from penstock.services.worker.quantization.format import WEIGHT, Format
from penstock.services.worker.quantization.quantization import Quantization
from penstock.services.worker.safetensors_file import listed
from penstock.services.worker.weight_reading import DTYPES, PinnedBuffers, StoredSlice

_PIECE = 1 << 22
"""Numbers that are dequantized at once."""
_NAN_CODE = 0x7F
"""Of e4m3, whatever the sign."""
_MAY_BE_ZERO = ("zeros", "order")


class _Part(NamedTuple):
    """What is read of one weight."""

    stored: StoredPart
    slices: dict[str, FileSlice]
    """Of the tensors that are there, by what follows the weight's name."""

    def memory(self, device: torch.device) -> dict[str, Tensor]:
        return {
            kind: torch.empty(each.shape, dtype=each.dtype, device=device)
            for kind, each in self.slices.items()
        }


class _LayerTensors(NamedTuple):
    """What files hold of a layer's quantized linear layers."""

    linears: list[tuple[QuantizedLinear, list[_Part]]]

    @property
    def slices(self) -> Iterator[FileSlice]:
        for _, parts in self.linears:
            for part in parts:
                yield from part.slices.values()


def quantized_slices(checkpoint: Checkpoint, weights: DecoderWeights) -> Iterator[FileSlice]:
    """What is read of quantized weights; their memory may be on the meta device."""
    for layer in _layers(checkpoint, weights):
        yield from layer.slices


def _layers(checkpoint: Checkpoint, weights: DecoderWeights) -> Iterator[_LayerTensors]:
    for index, layer in enumerate(weights.layers, weights.first_layer):
        yield _layer(checkpoint, weights.names.layer.format(index), layer.linears)
    head = weights.lm_head
    if isinstance(head, QuantizedLinear) and _is_stored(head, checkpoint):
        yield _layer(checkpoint, "", (head,))


def _layer(checkpoint: Checkpoint, prefix: str, linears: tuple[Linear, ...]) -> _LayerTensors:
    found = _LayerTensors([])
    for linear in linears:
        if isinstance(linear, QuantizedLinear):
            parts = [
                _Part(part, slices_of(checkpoint, prefix, part)) for part in linear.stored_parts()
            ]
            found.linears.append((linear, parts))
    return found


def _is_stored(head: QuantizedLinear, checkpoint: Checkpoint) -> bool:
    """Whether files hold a weight of the LM head."""
    return any(name in checkpoint for name in head.specification.stored_tensors(""))


class QuantizedReader:
    """Reads one model, whose files have been checked."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: DecoderWeights,
        plain: Sequence[StoredSlice],
        quantization: Quantization,
        progress: Callable[[str], None],
        may_be_zero: Callable[[str], bool],
        buffers: PinnedBuffers | None,
    ) -> None:
        """plain: what is read as it is."""
        self._checkpoint, self._weights, self._plain = checkpoint, weights, plain
        self._progress, self._may_be_zero, self._buffers = progress, may_be_zero, buffers
        self._quantization = quantization
        self._read = ReadProgress(0, 0, 0.0)
        self._zeros: list[str] = []

    def run(self) -> LoadReport:
        """Raises ``BadModelFolder``."""
        weights = self._weights
        plain, layers = (
            [each for each in self._plain if each.target.numel()],
            list(_layers(self._checkpoint, weights)),
        )
        size = sum(each.num_bytes for layer in layers for each in layer.slices)
        size += sum(map(self._slice_size, plain))
        self._read = ReadProgress(0, size, 0.0)
        coded = [(each, self._format(each.name)) for each in plain]
        self._load([each for each, format in coded if format is None], self._may_be_zero)
        for each, format in coded:
            if format is not None:
                self._load_plain(each, format)
        head = weights.lm_head
        if isinstance(head, QuantizedLinear) and not _is_stored(head, self._checkpoint):
            # Quantized while it is read, and the embedding, too: a second form of that.
            head.share = None  # a rank has its rows of that already
            head.take([(part, {WEIGHT: weights.embedding}) for part in head.stored_parts()])
        for layer in layers:
            self._load_layer(layer)
        return LoadReport(self._read.done_bytes, self._read.seconds, self._zeros)

    def _format(self, name: str) -> Format | None:
        """Of a tensor that is plain here and none in the file: an embedding in blocks."""
        format = self._quantization.named.get(name.removesuffix(WEIGHT))
        return None if format is None or not name.endswith(WEIGHT) else format

    def _load_plain(self, part: StoredSlice, format: Format) -> None:
        """Dequantize rows of a tensor that is no linear layer's into their place."""
        name, target = part.name, part.target
        entry = self._checkpoint.entry(name)
        shape = (len(target), *entry.shape[1:])
        stored = torch.empty(shape, dtype=DTYPES[entry.dtype], device=target.device)
        self._load([StoredSlice(name, stored, part.row)], self._may_be_zero)
        step = max(1, _PIECE // target.shape[1])
        for rows, codes in zip(torch.split(target, step), torch.split(stored, step), strict=True):
            made = format.weight({WEIGHT: codes}, *rows.shape)
            values = made if isinstance(made, Tensor) else made.dequantized()
            if not bool(values.isfinite().all()):
                raise self._damaged([self._checkpoint.place(name)])
            rows.copy_(values)

    def _slice_size(self, part: StoredSlice) -> int:
        """In the file, where rows of blocks are not as long as the target's."""
        entry = self._checkpoint.entry(part.name)
        size, row = entry.end - entry.begin, entry.shape[-1]
        blocks = self._format(part.name) is not None
        numbers = len(part.target) * row if blocks else part.target.numel()
        return size * numbers // math.prod(entry.shape)

    def _load_layer(self, layer: _LayerTensors) -> None:
        device = self._weights.embedding.device
        filled = [
            (linear, [(part, part.memory(device)) for part in parts])
            for linear, parts in layer.linears
        ]
        reads = [
            (part.slices[kind], tensor)
            for _, parts in filled
            for part, tensors in parts
            for kind, tensor in tensors.items()
        ]
        zero = self._zero_names(layer)
        self._load(
            [each.into(tensor) for each, tensor in reads],
            lambda name: name in zero or self._may_be_zero(name),
        )
        self._refuse_nan([(each.name, tensor) for each, tensor in reads])
        reads.clear()
        while filled:
            linear, parts = filled.pop(0)
            linear.take((part.stored, self._in_order(part, tensors)) for part, tensors in parts)
            if not linear.is_finite:  # scales that lie among codes, as in GGUF
                raise self._damaged([self._checkpoint.place(name) for name in _names_of(parts)])

    def _zero_names(self, layer: _LayerTensors) -> set[str]:
        head = self._weights.lm_head
        if layer.linears and layer.linears[0][0] is head and layer.linears[0][0].share is not None:
            return {each.name for each in layer.slices}  # rows that no token has, perhaps
        return {each.name for each in layer.slices if each.role in _MAY_BE_ZERO}

    def _in_order(self, part: _Part, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without the groups of a part of the inputs, which must follow from their places."""
        for kind, each in part.slices.items():
            if each.role != "order" or not part.stored.divides_inputs:
                continue
            size, inputs = part.stored.tensors[kind].group, part.stored.inputs
            wanted = torch.arange(inputs.start, inputs.stop)
            wanted //= size if size > 0 else part.stored.size[1]
            if not torch.equal(tensors.pop(kind).cpu().long(), wanted):
                raise BadModelFolder(
                    f"{self._checkpoint.place(each.name)}: inputs {inputs.start} to {inputs.stop} "
                    "of a rank are in groups with others; --pipeline-parallel-size divides the "
                    "model by layers"
                )
        return tensors

    def _load(
        self,
        targets: Sequence[StoredSlice],
        may_be_zero: Callable[[str], bool],
    ) -> None:
        report = self._checkpoint.load(
            targets, self._progress, may_be_zero, self._buffers, self._read
        )
        read = ReadProgress(report.done_bytes, report.done_bytes, report.seconds)
        self._read = read.behind(self._read)
        self._zeros += report.zero_tensors

    def _refuse_nan(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        wrong = [
            self._checkpoint.place(name)
            for name, tensor in tensors
            if tensor.dtype == torch.float8_e4m3fn
            and bool(((tensor.view(torch.uint8) & _NAN_CODE) == _NAN_CODE).any())
        ]
        if wrong:
            raise self._damaged(wrong)

    def _damaged(self, places: list[str]) -> BadModelFolder:
        return BadModelFolder(
            f"{self._checkpoint.folder}: tensors with values that are NaN or infinite: "
            f"{listed(places)}; the files are damaged: fetch them again"
        )


def _names_of(parts: Sequence[tuple[_Part, object]]) -> Iterable[str]:
    return dict.fromkeys(each.name for part, _ in parts for each in part.slices.values())
