"""Makes a model of a checkpoint folder: reads its weights, or draws random ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.protocol.config import Config
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.protocol.pooling import read_pooling
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.model_choice import ModelChoice, choose_model
from penstock.services.worker.models.adapter import TensorNames, may_be_zero
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.linear_specification import model_linears
from penstock.services.worker.models.quantized_linear import QuantizedLinear
from penstock.services.worker.models.rank_shares import own_model
from penstock.services.worker.models.registry import adapter_for, own_specification
from penstock.services.worker.models.specification import ModelSpecification, for_length
from penstock.services.worker.models.stored_form import as_stored
from penstock.services.worker.models.stored_slices import own_slices, take_shares
from penstock.services.worker.models.weights import (
    DecoderWeights,
    allocate_weights,
    in_halves,
    named_tensors,
)
from penstock.services.worker.quantization.format import WEIGHT
from penstock.services.worker.quantization.quantization import Quantization
from penstock.services.worker.quantization.reading import read_quantization
from penstock.services.worker.quantized_loading import QuantizedReader, quantized_slices
from penstock.services.worker.rank_group import RankGroup
from penstock.services.worker.stored_values import check_sizes, check_values, stored_tensors
from penstock.services.worker.weight_reading import PinnedBuffers, StoredSlice

Progress = Callable[[str], None]
Loaded = Callable[[LoadReport], None]

_log = logging.getLogger("penstock.worker")
DUMMY_STD = 0.02
"""Spread of random weights: as transformers initialises them."""
_HEADS = ("lm_head.", "score.")
_SMALL = 1 << 28
"""Parameters of a model of transformers' code that is loaded to be looked at."""


def make_model(
    config: Config,
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    loaded: Loaded,
    *,
    headless: bool = False,
    ranks: RankGroup | None = None,
) -> CausalModel:
    """The model that the configuration names; ``loaded`` is told what was read. headless: nobody
    asks for logits, and the folder may lack what makes them. ranks: those that share the model.

    One of our own families, or by transformers' modelling code. Raises ``BadModelFolder``.
    """
    random, seed = config.loading.load_format == "dummy", config.model.seed
    choice = choose_model(info, config)
    if choice.specification is None:
        progress("loading by transformers")
        return _by_transformers(choice, info, dtype, device, random=random, seed=seed)
    longest = config.model.max_model_len
    online = config.model.quantization
    if random:
        return random_model(info, dtype, device, seed, longest, online=online, ranks=ranks)
    return load_model(
        info, dtype, device, progress, loaded, longest,
        headless=headless, online=online, ranks=ranks,
    )  # fmt: skip


def _by_transformers(
    choice: ModelChoice,
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    *,
    random: bool,
    seed: int,
) -> CausalModel:
    from penstock.services.worker.models.transformers_loading import load_transformers_model

    with _naming_both(choice):
        model = load_transformers_model(info, dtype, device, random=random, seed=seed)
    if choice.refusal:
        _log.warning(
            "transformers' code computes the model, more slowly: its own family refuses it: %s",
            choice.refusal,
        )
        model.refusal = choice.refusal
    return model


@contextlib.contextmanager
def _naming_both(choice: ModelChoice) -> Iterator[None]:
    """Say of a model that transformers' code refuses why its own family does."""
    try:
        yield
    except BadModelFolder as failure:
        if not choice.refusal:
            raise
        raise BadModelFolder(f"{choice.refusal}; nor by transformers' code: {failure}") from None


def check_loadable(
    config: Config, info: ModelInfo, dtype: torch.dtype, choice: ModelChoice
) -> None:
    """As ``make_model``, but for memory and weights; what transformers' code computes is loaded if
    it is small, which shows what numbers alone do. Raises ``BadModelFolder``."""
    random = config.loading.load_format == "dummy"
    if choice.specification is not None:
        pooling = read_pooling(info, config.model)
        bare = not pooling.generates and not pooling.is_judge
        longest, online = config.model.max_model_len, config.model.quantization
        checked_model(info, Checkpoint(info.folder), dtype, longest, headless=bare, online=online)
        return
    from penstock.services.worker.models.transformers_loading import (
        check_transformers_model,
        load_transformers_model,
    )

    with _naming_both(choice):
        parameters = check_transformers_model(info, dtype, random=random)
        if parameters <= _SMALL:
            load_transformers_model(info, dtype, torch.device("cpu"), random=random, seed=0)


class CheckedModel(NamedTuple):
    """A model whose checkpoint holds what it expects, as it is stored."""

    model: ModelSpecification
    names: TensorNames
    notes: list[str]
    quantization: Quantization | None
    whole: DecoderWeights
    """On torch's meta device."""


def load_model(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    loaded: Loaded = lambda report: None,
    longest: int | None = None,
    *,
    headless: bool = False,
    online: str = "none",
    ranks: RankGroup | None = None,
) -> Decoder:
    """Check the whole checkpoint, then allocate and read the weights. longest: positions that a
    sequence may have, by default all that the model was trained for. headless: as in
    ``make_model``; the embedding stands for the LM head then. online: as ``--quantization`` says.
    ranks: this one of them reads its part alone, or keeps that of quantized layers."""
    progress("checking the checkpoint")
    checkpoint = Checkpoint(Path(info.folder))
    # Pinned while the device starts and memory is taken for the weights.
    buffers = PinnedBuffers(checkpoint.total_bytes) if device.type == "cuda" else None
    model, names, notes, quantization, whole = checked_model(
        info, checkpoint, dtype, longest, headless=headless, online=online, ranks=ranks
    )
    own = model if ranks is None else own_model(model, ranks.place)
    weights = allocate_weights(own, dtype, device, names, quantization, ranks)
    zero = may_be_zero(names, model, divided=ranks is not None)
    with torch.inference_mode():
        if ranks is None:
            slices = [StoredSlice(*one) for one in named_tensors(weights).items()]
        else:
            slices = own_slices(whole, weights, ranks.place)
            take_shares(whole, weights, ranks.place)
        if quantization is None:
            report = checkpoint.load(slices, progress, zero, buffers)
        else:
            reader = QuantizedReader(
                checkpoint, weights, slices, quantization, progress, zero, buffers
            )
            report = reader.run()
        loaded(replace(report, notes=notes))
        return _decoder(model, in_halves(own, weights), weights, ranks)


def checked_model(
    info: ModelInfo,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    longest: int | None,
    *,
    headless: bool,
    online: str,
    ranks: RankGroup | None = None,
) -> CheckedModel:
    """Check the whole checkpoint; arguments: see ``load_model``. Raises ``BadModelFolder``."""
    adapter, quantization = adapter_for(info), read_quantization(info, online)
    model = for_length(own_specification(info), longest or info.max_model_len)
    model, names, notes = as_stored(model, adapter.names, checkpoint)
    if headless:
        model = replace(model, tie_word_embeddings=True)
        quantization = None if quantization is None else quantization.without_head()
    whole = allocate_weights(model, dtype, torch.device("meta"), names, quantization)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(whole).items()}
    _check(checkpoint, shapes, model, names, quantization, whole, ranks, headless=headless)
    return CheckedModel(model, names, notes, quantization, whole)


def _decoder(
    whole: ModelSpecification,
    own: ModelSpecification,
    weights: DecoderWeights,
    ranks: RankGroup | None,
) -> Decoder:
    if ranks is None:
        return Decoder(own, weights)
    from penstock.services.worker.models.rank_decoder import RankDecoder

    return RankDecoder(whole, own, weights, ranks)


def _check(
    checkpoint: Checkpoint,
    shapes: dict[str, tuple[int, ...]],
    model: ModelSpecification,
    names: TensorNames,
    quantization: Quantization | None,
    whole: DecoderWeights,
    ranks: RankGroup | None,
    *,
    headless: bool,
) -> None:
    """Compare files with the model; of quantized weights, those scales too that this rank reads.
    shapes: of plain tensors."""

    def harmless(name: str) -> bool:
        unused = quantization is not None and quantization.is_unused(name)
        return unused or is_harmless(model, name) or (headless and name.startswith(_HEADS))

    if quantization is None:
        checkpoint.check(shapes, harmless)
        return
    linears = model_linears(model, names, quantization)
    check_sizes(linears, names.layer)
    stored = stored_tensors(linears, names.layer)
    for name, shape in list(shapes.items()):  # an embedding in blocks
        format = quantization.named.get(name.removesuffix(WEIGHT))
        if format is not None and len(shape) == 2:
            del shapes[name]
            stored[name] = format.tensors(*shape)[WEIGHT]
    if model.tie_word_embeddings:  # quantized while it is read, of the embedding
        stored = {name: each for name, each in stored.items() if not name.startswith(_HEADS)}
    checkpoint.check(shapes, harmless, stored)
    read = None
    if ranks is not None:
        own, meta = own_model(model, ranks.place), torch.device("meta")
        part = allocate_weights(own, torch.float32, meta, names, quantization, ranks)
        take_shares(whole, part, ranks.place)
        read = quantized_slices(checkpoint, part)
    check_values(checkpoint, stored, read)


def random_model(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    longest: int | None = None,
    *,
    online: str = "none",
    ranks: RankGroup | None = None,
) -> Decoder:
    """The model of ``config.json`` with random weights, drawn on the device; norms are 1. longest,
    online, ranks: see ``load_model``; each rank draws the whole, a tensor at a time, and keeps its
    part."""
    adapter, quantization = adapter_for(info), read_quantization(info, online)
    model = for_length(own_specification(info), longest or info.max_model_len)
    own = model if ranks is None else own_model(model, ranks.place)
    weights = allocate_weights(own, dtype, device, adapter.names, quantization, ranks)
    if ranks is None:
        return random_decoder(own, weights, seed)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.inference_mode():
        meta = torch.device("meta")
        whole = allocate_weights(model, dtype, meta, adapter.names, quantization)
        slices = own_slices(whole, weights, ranks.place)
        for name, tensor in named_tensors(whole).items():
            drawn = _draw(model, name, torch.empty_like(tensor, device=device), generator)
            for part in (each for each in slices if each.name == name):
                part.target.copy_(part.of(drawn))
        _draw_quantized(weights, generator)
        return _decoder(model, in_halves(own, weights), weights, ranks)


def random_decoder(model: ModelSpecification, weights: DecoderWeights, seed: int) -> Decoder:
    """The model of weights that are drawn here; norms are 1."""
    generator = torch.Generator(weights.embedding.device).manual_seed(seed)
    with torch.inference_mode():
        for name, tensor in named_tensors(weights).items():
            _draw(model, name, tensor, generator)
        _draw_quantized(weights, generator)
        return Decoder(in_halves(model, weights), weights)


def _draw(
    model: ModelSpecification, name: str, tensor: Tensor, generator: torch.Generator
) -> Tensor:
    if "norm" in name and name.endswith(".weight"):
        return tensor.fill_(0.0 if model.norm.plus_one else 1.0)
    return tensor.normal_(0.0, DUMMY_STD, generator=generator)


def _draw_quantized(weights: DecoderWeights, generator: torch.Generator) -> None:
    linears = [linear for layer in weights.layers for linear in layer.linears]
    for linear in (*linears, weights.lm_head):
        if isinstance(linear, QuantizedLinear):
            linear.draw(DUMMY_STD, generator)


def is_harmless(model: ModelSpecification, name: str) -> bool:
    """Surplus tensors that older checkpoints hold and no model needs."""
    if name == "lm_head.weight":
        return model.tie_word_embeddings
    return name.endswith(
        ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "rope_freqs.weight")
    )
