"""The kernels that a worker launches at its start, found without a device and without memory.

An executor is made on torch's meta device, with the sizes that the worker has, and runs what the
worker runs (``GpuExecutor.run_kernels``) while launches are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.kernels.gpu.norm import rms_norm
from penstock.kernels.gpu.recorded_launches import Recorder
from penstock.kernels.gpu.rotate_heads import rotate_heads
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.compressed_layers import (
    Compression,
    compress_all,
    no_compression,
    why_never,
)
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.model_decoder import model_executor
from penstock.services.worker.kernel_needs import (
    COMPRESSED,
    AttentionNeeds,
    CodedLinear,
    CodedWeights,
    KernelNeeds,
    table_widths,
)
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.loaded_model import attention_for_kernels, form_for_kernels
from penstock.services.worker.models.causal_model import StepInputs
from penstock.services.worker.models.dense import caches_of
from penstock.services.worker.models.dense_form import DenseModel, dense_model
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LayerLinears
from penstock.services.worker.models.specification import CacheSpecification, head_shape
from penstock.services.worker.models.weight_words import with_forms
from penstock.services.worker.models.weights import (
    DecoderWeights,
    allocate_weights,
    in_halves,
)

_PRODUCTS = ("mm", "addmm", "index_select", "_scaled_mm")
"""Functions of torch that fill ``out`` with kernels of its own."""
_BLOCKS = 1024
"""KV blocks; how many there are decides nothing that is compiled."""


def launch_all(needs: KernelNeeds) -> str:
    """Launch all kernels that a worker with these needs launches at its start; returns which were
    chosen. A ``Recorder`` must be there, and the device pretended."""
    if needs.attention is not None:
        return _launch_attention(needs, needs.attention)
    model = _on_meta(needs)
    if isinstance(model, str):
        return model
    summaries = []
    for form in needs.forms:
        compression = _compression(model, form)
        for length in table_widths(needs):
            sizes = _sizes(needs, length, model.config.vocab_size, caches_of(model.config))
            with _without_products():
                executor = dense_executor(*model, sizes, compression, needs.kv_kind)
                executor.run_kernels()
            summaries.append(executor.summary)
    return "\n".join(dict.fromkeys(summaries))


def _launch_attention(needs: KernelNeeds, attention: AttentionNeeds) -> str:
    """As ``launch_all``, for a model whose layers are not computed by our kernels."""
    dtype: torch.dtype = getattr(torch, needs.dtype)
    model = AttendingModel(attention, dtype)
    form = attention_for_kernels(
        attention.caches, attention.hidden_size, attention.vocab_size, dtype.itemsize,
        needs.block_size,
    )  # fmt: skip
    if isinstance(form, str):
        return form
    if attention.modelling_code:
        _launch_replaced(attention, dtype)
    words = "layers by other code"
    summaries = []
    for length in table_widths(needs):
        sizes = _sizes(needs, length, attention.vocab_size, attention.caches)
        executor = model_executor(model, words, sizes, needs.kv_kind)
        executor.run_kernels()
        summaries.append(executor.summary)
    return "\n".join(dict.fromkeys(summaries))


def _launch_replaced(attention: AttentionNeeds, dtype: torch.dtype) -> None:
    """What ``module_kernels`` puts in the place of modelling code, for its usual forms."""
    heads, kv_heads, dim = head_shape(attention.caches)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows = empty(2, attention.hidden_size)
    rms_norm(rows, rows[0], 1e-6, rows)
    angles = empty(2, dim)
    rotate_heads(empty(2, heads, dim), empty(2, kv_heads, dim), angles, angles)


class AttendingModel:
    """A ``CausalModel`` on the meta device that does nothing but attend."""

    device = torch.device("meta")
    packed = False
    num_parameters = 0

    def __init__(self, needs: AttentionNeeds, dtype: torch.dtype) -> None:
        self.caches, self.dtype = needs.caches, dtype
        self.hidden_size, self.vocab_size = needs.hidden_size, needs.vocab_size

    def prepare(self, max_positions: int) -> None:
        """Nothing depends on positions."""

    def hidden(self, step: StepInputs, rows: Tensor | None) -> Tensor:
        count = len(step.tokens)
        for layer, cache in enumerate(self.caches):
            heads, kv_heads = cache.num_heads, cache.num_kv_heads
            # Strided as by a fused product, of which queries and keys are rotated.
            rotated = self._empty(count, heads + kv_heads, cache.head_dim)
            fused = self._empty(count, heads + 2 * kv_heads, cache.head_dim)
            parts = rotated[:, :heads], rotated[:, heads:], fused[:, heads + kv_heads :]
            step.attention(layer, *parts, self._empty(heads) if cache.sinks else None)
        return self._empty(count, self.hidden_size)

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        return self._empty(len(hidden), self.vocab_size)

    def last_hidden(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        return hidden

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


def _sizes(
    needs: KernelNeeds, length: int, vocab_size: int, caches: Sequence[CacheSpecification]
) -> EngineSizes:
    return EngineSizes(
        num_blocks=_BLOCKS,
        block_size=needs.block_size,
        max_num_seqs=needs.max_num_seqs,
        max_num_batched_tokens=needs.max_num_batched_tokens,
        max_model_len=length,
        vocab_size=vocab_size,
        groups=group_layers(caches).groups,
    )


@contextlib.contextmanager
def _without_products() -> Iterator[None]:
    """Leave the library's products out: they compile nothing, and torch's first one on the meta
    device imports a computer algebra system, for a second."""
    kept = {name: getattr(torch, name) for name in _PRODUCTS}
    try:
        for name in _PRODUCTS:
            setattr(torch, name, lambda *inputs, out, **options: out)
        yield
    finally:
        for name, function in kept.items():
            setattr(torch, name, function)


def _on_meta(needs: KernelNeeds) -> DenseModel | str:
    dtype: torch.dtype = getattr(torch, needs.dtype)
    if needs.model is None:
        raise ValueError("no layers of this model are computed by kernels")
    weights = allocate_weights(needs.model, dtype, torch.device("meta"))
    if needs.coded is not None:
        _give_forms(weights, needs.coded, dtype)
    with torch.inference_mode():
        specification = in_halves(needs.model, weights)
    config = form_for_kernels(specification, dtype.itemsize, needs.block_size)
    return config if isinstance(config, str) else dense_model(config, specification, weights)


def _give_forms(weights: DecoderWeights, coded: CodedWeights, dtype: torch.dtype) -> None:
    """Let quantized linear layers take the place of those that are."""

    def formed(linear: Linear, form: CodedLinear | None) -> Linear:
        if form is None:
            return linear
        meta = linear.weight.device
        return with_forms(linear.specification, form.parts, dtype, meta, quantizes=form.quantizes)

    for layer, forms in zip(weights.layers, coded.layers, strict=True):
        layer.linears = LayerLinears(*map(formed, layer.linears, forms))
    weights.lm_head = formed(weights.lm_head, coded.head)


def _compression(model: DenseModel, form: str) -> Compression:
    unfit = why_never(model.weights)
    if form != COMPRESSED or unfit:
        return no_compression(unfit or "where they have no room")
    from penstock.kernels.gpu.compressed_weights import CannotCompress

    try:
        with torch.inference_mode():
            return Compression("weights are compressed, too", compress_all(model.weights).linears)
    except CannotCompress as failure:
        return no_compression(str(failure))


def recorder_for(needs: KernelNeeds) -> tuple[Recorder, str]:
    """All that ``launch_all`` launches, recorded, and which kernels were chosen."""
    recorder = Recorder(needs.device.capability)
    return recorder, launch_all(needs)
