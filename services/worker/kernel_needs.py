"""Which kernels a worker needs: what decides it, as data, known before torch is imported."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.gpu.device_facts import DeviceFacts
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.ahead_checks import type_name
from penstock.services.worker.measured_kernels import read_table
from penstock.services.worker.model_shape import BY_TRANSFORMERS, ModelShape, read_shape
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.dense import DenseConfig, paged_config
from penstock.services.worker.models.linear_specification import (
    KeptPart,
    LinearSpecification,
    model_linears,
)
from penstock.services.worker.models.registry import adapter_for, own_specification
from penstock.services.worker.models.specification import (
    CacheSpecification,
    Layer,
    ModelSpecification,
    for_length,
)
from penstock.services.worker.plan import PlannedDevice, Planner
from penstock.services.worker.quantization.quantization import Quantization
from penstock.services.worker.quantization.reading import read_quantization

PLAIN, COMPRESSED = "plain", "compressed"
"""Forms of weights that there are kernels for, for steps of few rows."""
ANY_WIDTH = "any width of block tables"
_UNSURE = 0.1
"""Share of a GPU's memory by which the plan may be wrong about what fits."""


class AttentionNeeds(msgspec.Struct, frozen=True):
    """A model of which our kernels compute attention and what comes behind the logits."""

    caches: tuple[CacheSpecification, ...]
    """One of each kind, and two at least."""
    hidden_size: int
    vocab_size: int
    modelling_code: bool
    """Whether it is transformers' code, whose RMSNorm and rotary embedding are ours, too."""


class CodedLinear(msgspec.Struct, frozen=True):
    """A linear layer of a quantized model."""

    parts: tuple[KeptPart, ...]
    quantizes: bool = False
    """Whether its rows may be quantized, too."""


class CodedWeights(msgspec.Struct, frozen=True):
    """Of ``KernelNeeds.model``; ``None``: a layer is plain."""

    layers: tuple[tuple[CodedLinear | None, ...], ...]
    """For each layer, in the order of ``LayerLinears``."""
    head: CodedLinear | None


class KernelNeeds(msgspec.Struct, frozen=True):
    """What decides which kernels are compiled, and for what."""

    model: ModelSpecification | None
    """With few layers: ``of_each_kind``. ``None``: see ``attention``."""
    dtype: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    device: DeviceFacts
    forms: tuple[str, ...]
    """Of weights: those that the worker may have."""
    may_be_cut: bool = False
    """Whether KV memory may hold fewer tokens than ``max_model_len``, and block tables be less
    wide."""
    attention: AttentionNeeds | None = None
    """Of a model whose layers our kernels do not compute."""
    coded: CodedWeights | None = None
    """Of a quantized model."""
    kv_kind: KVCacheKind = "auto"
    """Of KV memory."""
    kernel_table: tuple[str, ...] = ()
    """Choices that were measured."""

    @property
    def variants(self) -> list[str]:
        """What of it depends on how much memory there is."""
        return [*self.forms, *([ANY_WIDTH] if self.may_be_cut else [])]


def kernel_needs(config: Config, info: ModelInfo, device: PlannedDevice, facts: DeviceFacts,
                 *, everything: bool = False) -> KernelNeeds | str:  # fmt: skip
    """For a worker with this configuration, or why none are compiled ahead for it.

    everything: what is needed on such a GPU whatever its memory.

    Raises ``BadModelFolder`` and ``ConfigError``.
    """
    if config.cluster.world_size > 1:
        return "kernels of a model that is divided are compiled when they are first launched"
    if config.device.deterministic:
        return "kernels of --deterministic are compiled when they are first launched"
    shape = read_shape(info, config)
    longest, planner = config.model.max_model_len or info.max_model_len, Planner(info, device)
    model = attention = coded = None
    if isinstance(shape.dense, DenseConfig):
        model = for_length(own_specification(info), longest)
        quantization = read_quantization(info, config.model.quantization)
        if quantization is None:
            model = of_each_kind(model)
        else:
            model, coded = _coded(model, adapter_for(info).names, quantization)
    else:
        found = _attention_needs(shape)
        if isinstance(found, str):
            return found
        attention = found
    return KernelNeeds(
        model=model,
        attention=attention,
        coded=coded,
        dtype=type_name(config.model.dtype, info, on_cpu=False),
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=longest,
        device=facts,
        forms=_forms(planner, config, everything),
        kv_kind=config.cache.kv_kind,
        kernel_table=tuple(map(str, read_table(config))),
        may_be_cut=everything or _may_be_cut(planner, config, longest),
    )


def _attention_needs(shape: ModelShape) -> AttentionNeeds | str:
    form = paged_config(shape.caches, shape.hidden, shape.mlp_width, shape.vocab)
    if isinstance(form, str):
        return f"{shape.dense}; attention: the kernels lack {form}"
    kinds = list(dict.fromkeys(shape.caches))
    caches = tuple(kinds if len(kinds) > 1 else 2 * kinds)
    return AttentionNeeds(caches, shape.hidden, shape.vocab, shape.dense == BY_TRANSFORMERS)


def of_each_kind(model: ModelSpecification) -> ModelSpecification:
    """The model with one layer of each kind, and two at least: behind the last one less is
    computed."""
    kinds: list[Layer] = list(dict.fromkeys(model.layers))
    return replace(model, layers=tuple(kinds if len(kinds) > 1 else 2 * kinds))


def _coded(
    model: ModelSpecification, names: TensorNames, quantization: Quantization
) -> tuple[ModelSpecification, CodedWeights]:
    """As ``of_each_kind``, of layers that are stored alike."""
    linears = model_linears(model, names, quantization)
    coded = [tuple(map(_coded_linear, layer)) for layer in linears.layers]
    kinds = list(dict.fromkeys(zip(model.layers, coded, strict=True)))
    layers, weights = zip(*(kinds if len(kinds) > 1 else 2 * kinds), strict=True)
    return replace(model, layers=layers), CodedWeights(weights, _coded_linear(linears.head))


def _coded_linear(linear: LinearSpecification) -> CodedLinear | None:
    return CodedLinear(tuple(linear.kept), linear.quantizes_rows) if linear.formats else None


def _forms(planner: Planner, config: Config, everything: bool) -> tuple[str, ...]:
    """Of the weights, as planned for about as much memory as the GPU has."""
    shares = (1e3, 0.0) if everything else (1.0 - _UNSURE, 1.0 + _UNSURE)
    return tuple(sorted({
        COMPRESSED if planner.is_compressed(config, share) else PLAIN for share in shares
    }))  # fmt: skip


def _may_be_cut(planner: Planner, config: Config, longest: int) -> bool:
    try:
        return planner.account(config).kv_tokens < (1.0 + 2 * _UNSURE) * longest
    except ConfigError:
        return True


def table_widths(needs: KernelNeeds) -> list[int]:
    """Lengths of sequences that stand for all widths of block tables that kernels tell apart: the
    worker's, and those of the step that it measures before."""
    measured = min(needs.max_num_batched_tokens, needs.max_model_len)
    kinds: dict[bool, int] = {}
    shorter = (4 * needs.block_size, 16 * needs.block_size) if needs.may_be_cut else ()
    for length in (needs.max_model_len, measured, *shorter):
        width = -(-length // needs.block_size)
        kinds.setdefault((-(-width // 4) * 4) % 16 == 0, length)
    return list(kinds.values())
