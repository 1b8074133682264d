"""Weights that are kept a second time, compressed, for steps of few rows.

Those steps take as long as it takes to read the weights, and their compressed form
(``compressed_weights``) is three quarters of the bytes. Large steps multiply with the plain form.
So compression is paid for in memory, and done where that is a small part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.kernels.gpu.cache_keys import make_keys_stable
from penstock.kernels.gpu.few_rows_linear import NARROW
from penstock.services.worker.gpu.kernel_choice import not_hopper, short
from penstock.services.worker.models.dense import DenseWeights
from penstock.services.worker.models.linear import Linear

if TYPE_CHECKING:
    from penstock.kernels.gpu.compressed_weights import CompressedWeight

MOST_MEMORY = 1 / 6
"""Compressed weights may take this share of the memory that the worker may use ..."""
MOST_LEFT = 0.25
"""... and this share of what is left of it beside the weights and other processes."""
COMPRESSED_SHARE = 0.76
"""Bytes of compressed weights, exceptions included, as a share of the plain ones'."""
_GIB = 1 << 30


class Compression(msgspec.Struct):
    summary: str
    linears: list[Linear] = []
    """Linear layers that have a compressed weight: all of the model, or all but the LM head."""

    def drop(self, reason: str) -> bool:
        """Give their memory back; whether there were any."""
        if not self.linears:
            return False
        for linear in self.linears:
            linear.compressed = None
        self.linears, self.summary = [], _left_plain(reason)
        return True


def no_compression(reason: str) -> Compression:
    return Compression(_left_plain(reason))


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
        return compress_all(weights)
    except CannotCompress as failure:
        return no_compression(str(failure))
    except Exception as failure:  # Gluon is experimental: another Triton may fail on any name
        return no_compression(short(failure))


def why_never(weights: DenseWeights) -> str:
    """Why weights of this form are not compressed, whatever the memory; empty if they may be."""
    reason, (_, width) = not_hopper(), weights.embedding.shape
    if reason:
        return reason
    if weights.embedding.dtype != torch.bfloat16:
        return f"only bfloat16 is, not {str(weights.embedding.dtype).removeprefix('torch.')}"
    if any(linear.quantized for layer in weights.layers for linear in layer.linears):
        return "they are quantized"
    if width < NARROW:
        return f"steps of {width} columns are not bound by reading them"
    return ""


def _no_room(weights: DenseWeights, utilization: float) -> str:
    wanted = COMPRESSED_SHARE * _num_bytes(weights)
    free, total = torch.cuda.mem_get_info(weights.embedding.device)
    usable = utilization * total
    room = max(0.0, min(MOST_MEMORY * usable, MOST_LEFT * (usable - (total - free))))
    if wanted > room:
        return (
            f"that takes {wanted / _GIB:.1f} GiB; {room / _GIB:.1f} may be used, a sixth of what "
            "--gpu-memory-utilization gives and a quarter of what is left of it"
        )
    return ""


def compress_all(weights: DenseWeights) -> Compression:
    """Compress the weights of all layers, and the LM head where that is possible.

    Raises ``CannotCompress`` and what Triton raises; no weight is compressed then.
    """
    from penstock.kernels.gpu.compressed_weights import CannotCompress

    plain, head, compression = _num_bytes(weights), weights.lm_head, Compression("")
    try:
        for index, layer in enumerate(weights.layers):
            for linear in layer.linears:
                linear.compressed = _compressed(linear, f" of layer {index}")
                compression.linears.append(linear)
    except Exception:
        compression.drop("it failed")
        raise
    beside = ""
    try:
        head.compressed = _compressed(head)
        compression.linears.append(head)
    except CannotCompress as failure:
        beside = f", but for {failure}"
    except torch.OutOfMemoryError as failure:
        beside = f", but for the LM head: {short(failure)}"
    size = (_num_bytes(weights) - plain) / _GIB
    compression.summary = f"weights are compressed, too, for few rows ({size:.1f} GiB){beside}"
    return compression


def _num_bytes(weights: DenseWeights) -> int:
    """Of all linear layers in all their forms."""
    linears = (linear for layer in weights.layers for linear in layer.linears)
    return weights.lm_head.num_bytes + sum(linear.num_bytes for linear in linears)


def _compressed(linear: Linear, where: str = "") -> CompressedWeight:
    """where: for the failure. Raises ``CannotCompress``."""
    from penstock.kernels.gpu.compressed_linear_hopper import why_not
    from penstock.kernels.gpu.compressed_weights import CannotCompress, compress
    from penstock.kernels.gpu.rows_linear_hopper import splits_for

    each = linear.specification
    splits = splits_for(each.inputs, each.outputs) if each.shard == "inputs" else 1
    try:
        reason = why_not(each.outputs, each.inputs, splits, gated=each.gated)
        if reason:
            raise CannotCompress(reason)
        return compress(linear.weight, gated=each.gated, splits=splits)
    except CannotCompress as failure:
        names = " and ".join(each.names)
        raise CannotCompress(f"{names}{where}: {failure}") from None
