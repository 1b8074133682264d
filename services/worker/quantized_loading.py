"""Reads the weights of a quantized model, or quantizes plain ones while they are read.

Layer after layer: what files hold of a layer's weights is read into memory of its own, becomes the
layer's ``QuantizedWeight`` and is given back. So beside the model one layer is in memory twice, as
stored and as kept, whatever the format. A rank reads all of its layers,
and keeps its part of them. What can be wrong with scales is found before (``stored_values``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.load_report import LoadReport, ReadProgress
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.quantized_linear import QuantizedLinear
from penstock.services.worker.models.weights import DecoderWeights
from penstock.services.worker.quantization.format import WEIGHT, Format, StoredTensor
from penstock.services.worker.quantization.quantization import Quantization
from penstock.services.worker.safetensors_file import listed
from penstock.services.worker.weight_reading import DTYPES, PinnedBuffers, StoredSlice

_PIECE = 1 << 22
"""Numbers that are dequantized at once."""
_NAN_CODE = 0x7F
"""Of e4m3, whatever the sign."""
_MAY_BE_ZERO = ("zeros", "order")


class _LayerTensors(NamedTuple):
    """What files hold of a layer's quantized linear layers."""

    stored: dict[str, StoredTensor]
    linears: list[tuple[str, QuantizedLinear]]
    """With what their names begin with."""


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
        self._there, self._quantization = checkpoint.shapes(), quantization
        self._read = ReadProgress(0, 0, 0.0)
        self._zeros: list[str] = []

    def run(self) -> LoadReport:
        """Raises ``BadModelFolder``."""
        weights = self._weights
        plain, layers = [each for each in self._plain if each.target.numel()], list(self._layers())
        names = [name for layer in layers for name in layer.stored]
        size = sum(map(self._size, names)) + sum(map(self._slice_size, plain))
        self._read = ReadProgress(0, size, 0.0)
        coded = [(each, self._format(each.name)) for each in plain]
        self._load([each for each, format in coded if format is None], self._may_be_zero)
        for each, format in coded:
            if format is not None:
                self._load_plain(each, format)
        head = weights.lm_head
        if isinstance(head, QuantizedLinear) and not self._stored(head):
            # Quantized while it is read, and the embedding, too: a second form of that.
            (name,) = head.specification.names
            head.share = None  # a rank has its rows of that already
            head.take({f"{name}.weight": weights.embedding})
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

    def _layers(self) -> Iterator[_LayerTensors]:
        weights = self._weights
        for index, layer in enumerate(weights.layers, weights.first_layer):
            yield self._layer(weights.names.layer.format(index), layer.linears)
        head = weights.lm_head
        if isinstance(head, QuantizedLinear) and self._stored(head):
            yield self._layer("", (head,))

    def _layer(self, prefix: str, linears: tuple[Linear, ...]) -> _LayerTensors:
        found = _LayerTensors({}, [])
        for linear in linears:
            if isinstance(linear, QuantizedLinear):
                stored = linear.specification.stored_tensors(prefix)
                found.stored.update({n: each for n, each in stored.items() if n in self._there})
                found.linears.append((prefix, linear))
        return found

    def _stored(self, head: QuantizedLinear) -> bool:
        """Whether files hold a weight of the LM head."""
        return any(name in self._there for name in head.specification.stored_tensors(""))

    def _size(self, name: str) -> int:
        entry = self._checkpoint.entry(name)
        return entry.end - entry.begin

    def _slice_size(self, part: StoredSlice) -> int:
        """Of whole rows."""
        return (
            self._size(part.name) * len(part.target) // self._checkpoint.entry(part.name).shape[0]
        )

    def _load_layer(self, layer: _LayerTensors) -> None:
        device = self._weights.embedding.device
        tensors = {}
        for name in layer.stored:
            entry = self._checkpoint.entry(name)
            tensors[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
        zero = {name for name, each in layer.stored.items() if each.role in _MAY_BE_ZERO}
        self._load(tensors, lambda name: name in zero or self._may_be_zero(name))
        self._refuse_nan(tensors)
        for prefix, linear in layer.linears:
            names = linear.specification.stored_tensors(prefix)
            own_names = [name for name in names if name in tensors]
            own = {n.removeprefix(prefix): tensors.pop(n) for n in names if n in tensors}
            linear.take(own)
            if not linear.is_finite:  # scales that lie among codes, as in GGUF
                raise self._damaged([self._checkpoint.place(name) for name in own_names])

    def _load(
        self,
        targets: Mapping[str, Tensor] | Sequence[StoredSlice],
        may_be_zero: Callable[[str], bool],
    ) -> None:
        report = self._checkpoint.load(
            targets, self._progress, may_be_zero, self._buffers, self._read
        )
        read = ReadProgress(report.done_bytes, report.done_bytes, report.seconds)
        self._read = read.behind(self._read)
        self._zeros += report.zero_tensors

    def _refuse_nan(self, tensors: Mapping[str, Tensor]) -> None:
        wrong = [
            self._checkpoint.place(name)
            for name, tensor in tensors.items()
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
