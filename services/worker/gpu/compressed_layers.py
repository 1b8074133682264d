"""Weights that are kept a second time, compressed, for steps of few rows.

Those steps take as long as it takes to read the weights, and their compressed form
(``compressed_weights``) is three quarters of the bytes. Large steps multiply with the plain form.
So compression is paid for in memory, and done where that is a small part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor

from penstock.kernels.gpu.cache_keys import make_keys_stable
from penstock.kernels.gpu.few_rows_linear import NARROW
from penstock.services.worker.gpu.kernel_choice import not_hopper, short
from penstock.services.worker.gpu.layer_products import DIVIDED
from penstock.services.worker.models.dense import DenseWeights

if TYPE_CHECKING:
    from penstock.kernels.gpu.compressed_weights import CompressedWeight

MOST_MEMORY = 0.1
"""Compressed weights may take this share of the memory that the worker may use ..."""
MOST_LEFT = 0.25
"""... and this share of what is left of it beside the weights and other processes."""
COMPRESSED_SHARE = 0.76
"""Bytes of compressed weights, exceptions included, as a share of the plain ones'."""
_GIB = 1 << 30


class CompressedLayers(NamedTuple):
    """Compressed weights of each layer, and of the LM head if it can be compressed."""

    qkv: list[CompressedWeight]
    output: list[CompressedWeight]
    gate_up: list[CompressedWeight]
    down: list[CompressedWeight]
    head: CompressedWeight | str
    """Or why it is not compressed."""


class Compression(msgspec.Struct):
    layers: CompressedLayers | None
    summary: str

    def drop(self, reason: str) -> bool:
        """Give their memory back; whether there were any."""
        if self.layers is None:
            return False
        self.layers, self.summary = None, _left_plain(reason)
        return True


def splits_of(name: str, rows: int, width: int) -> int:
    """How many programs share the width of a layer, W [rows, width]."""
    from penstock.kernels.gpu.rows_linear_hopper import splits_for

    return splits_for(width, rows) if name in DIVIDED else 1


def no_compression(reason: str) -> Compression:
    return Compression(None, _left_plain(reason))


def _left_plain(reason: str) -> str:
    return f"weights are not compressed: {reason}"


def compress_layers(weights: DenseWeights, utilization: float) -> Compression:
    """Compress the weights of a model on a CUDA device, or say why not; utilization: share of the
    device's memory that the worker may use."""
    reason = why_never(weights) or _no_room(weights, utilization)
    if reason:
        return no_compression(reason)
    make_keys_stable()
    from penstock.kernels.gpu.compressed_weights import CannotCompress

    try:
        compressed = compress_all(weights)
    except CannotCompress as failure:
        return no_compression(str(failure))
    except Exception as failure:  # Gluon is experimental: another Triton may fail on any name
        return no_compression(short(failure))
    summary = f"weights are compressed, too, for few rows ({_num_bytes(compressed) / _GIB:.1f} GiB)"
    if isinstance(compressed.head, str):
        summary += f", but for the LM head: {compressed.head}"
    return Compression(compressed, summary)


def why_never(weights: DenseWeights) -> str:
    """Why weights of this form are not compressed, whatever the memory; empty if they may be."""
    layer = weights.layers[0]
    reason = not_hopper()
    if reason:
        return reason
    if layer.qkv.dtype != torch.bfloat16:
        return f"only bfloat16 is, not {str(layer.qkv.dtype).removeprefix('torch.')}"
    if layer.qkv.shape[1] < NARROW:
        return f"steps of {layer.qkv.shape[1]} columns are not bound by reading them"
    return ""


def _no_room(weights: DenseWeights, utilization: float) -> str:
    device = weights.embedding.device
    tensors = [weights.lm_head]
    for one in weights.layers:
        tensors += [one.qkv, one.output, one.gate_up, one.down]
    wanted = COMPRESSED_SHARE * sum(tensor.nbytes for tensor in tensors)
    free, total = torch.cuda.mem_get_info(device)
    usable = utilization * total
    room = max(0.0, min(MOST_MEMORY * usable, MOST_LEFT * (usable - (total - free))))
    if wanted > room:
        return (
            f"that takes {wanted / _GIB:.1f} GiB; {room / _GIB:.1f} may be used, a tenth of what "
            "--gpu-memory-utilization gives and a quarter of what is left of it"
        )
    return ""


def compress_all(weights: DenseWeights) -> CompressedLayers:
    return CompressedLayers(
        qkv=_compress_each(weights, "qkv"),
        output=_compress_each(weights, "output"),
        gate_up=_compress_each(weights, "gate_up"),
        down=_compress_each(weights, "down"),
        head=_compress_head(weights.lm_head),
    )


def _compress_each(weights: DenseWeights, name: str) -> list[CompressedWeight]:
    """Compress one weight of all layers. Raises ``CannotCompress``."""
    from penstock.kernels.gpu.compressed_linear_hopper import why_not
    from penstock.kernels.gpu.compressed_weights import CannotCompress, compress

    compressed = []
    for index, layer in enumerate(weights.layers):
        matrix, gated = getattr(layer, name), name == "gate_up"
        rows, width = matrix.shape
        splits = splits_of(name, rows, width)
        try:
            reason = why_not(rows, width, splits, gated=gated)
            if reason:
                raise CannotCompress(reason)
            compressed.append(compress(matrix, gated=gated, splits=splits))
        except CannotCompress as failure:
            raise CannotCompress(f"{name} of layer {index}: {failure}") from None
    return compressed


def _compress_head(head: Tensor) -> CompressedWeight | str:
    """Or why not; the layers can be without."""
    from penstock.kernels.gpu.compressed_linear_hopper import why_not
    from penstock.kernels.gpu.compressed_weights import CannotCompress, compress

    rows, width = head.shape
    try:
        return why_not(rows, width, 1) or compress(head)
    except (CannotCompress, torch.OutOfMemoryError) as failure:
        return short(failure)


def _num_bytes(layers: CompressedLayers) -> int:
    every = layers.qkv + layers.output + layers.gate_up + layers.down
    head = 0 if isinstance(layers.head, str) else layers.head.num_bytes
    return head + sum(weight.num_bytes for weight in every)
