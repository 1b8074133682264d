"""Makes a model of a checkpoint folder: reads its weights, or draws random ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.protocol.config import Config
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.model_choice import ModelChoice, choose_model
from penstock.services.worker.models.adapter import may_be_zero
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.rank_shares import own_model
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.models.specification import ModelSpecification, for_length
from penstock.services.worker.models.stored_form import as_stored
from penstock.services.worker.models.stored_slices import own_slices
from penstock.services.worker.models.weights import (
    DecoderWeights,
    allocate_weights,
    in_halves,
    named_tensors,
)
from penstock.services.worker.rank_group import RankGroup
from penstock.services.worker.weight_reading import PinnedBuffers

Progress = Callable[[str], None]
Loaded = Callable[[LoadReport], None]

_log = logging.getLogger("penstock.worker")
DUMMY_STD = 0.02
"""Spread of random weights: as transformers initialises them."""
_HEADS = ("lm_head.", "score.")


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
    if random:
        return random_model(info, dtype, device, seed, longest, ranks)
    return load_model(
        info, dtype, device, progress, loaded, longest, headless=headless, ranks=ranks
    )


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

    try:
        model = load_transformers_model(info, dtype, device, random=random, seed=seed)
    except BadModelFolder as failure:
        if not choice.refusal:
            raise
        raise BadModelFolder(f"{choice.refusal}; nor by transformers' code: {failure}") from None
    if choice.refusal:
        _log.warning(
            "transformers' code computes the model, more slowly: its own family refuses it: %s",
            choice.refusal,
        )
        model.refusal = choice.refusal
    return model


def load_model(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    loaded: Loaded = lambda report: None,
    longest: int | None = None,
    *,
    headless: bool = False,
    ranks: RankGroup | None = None,
) -> Decoder:
    """Check the whole checkpoint, then allocate and read the weights. longest: positions that a
    sequence may have, by default all that the model was trained for. headless: as in
    ``make_model``; the embedding stands for the LM head then. ranks: this one of them reads its
    part alone."""
    adapter = adapter_for(info)
    model = for_length(adapter.specification(info), longest or info.max_model_len)
    progress("checking the checkpoint")
    checkpoint = Checkpoint(Path(info.folder))
    model, names, notes = as_stored(model, adapter.names, checkpoint)
    if headless:
        model = replace(model, tie_word_embeddings=True)
    # Pinned while the device starts and memory is taken for the weights.
    buffers = PinnedBuffers(checkpoint.total_bytes) if device.type == "cuda" else None
    whole = allocate_weights(model, dtype, torch.device("meta"), names)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(whole).items()}
    checkpoint.check(
        shapes,
        lambda name: is_harmless(model, name) or (headless and name.startswith(_HEADS)),
    )
    own = model if ranks is None else own_model(model, ranks.place)
    weights = allocate_weights(own, dtype, device, names, ranks)
    with torch.inference_mode():
        targets = (
            named_tensors(weights) if ranks is None else own_slices(whole, weights, ranks.place)
        )
        zero = may_be_zero(names, model, divided=ranks is not None)
        report = checkpoint.load(targets, progress, zero, buffers)
        loaded(replace(report, notes=notes))
        return _decoder(model, in_halves(own, weights), weights, ranks)


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


def random_model(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    longest: int | None = None,
    ranks: RankGroup | None = None,
) -> Decoder:
    """The model of ``config.json`` with random weights, drawn on the device; norms are 1. longest,
    ranks: see ``load_model``; each rank draws the whole, a tensor at a time, and keeps its part."""
    adapter = adapter_for(info)
    model = for_length(adapter.specification(info), longest or info.max_model_len)
    own = model if ranks is None else own_model(model, ranks.place)
    weights = allocate_weights(own, dtype, device, adapter.names, ranks)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, tensor: Tensor) -> Tensor:
        if "norm" in name and name.endswith(".weight"):
            return tensor.fill_(0.0 if model.norm.plus_one else 1.0)
        return tensor.normal_(0.0, DUMMY_STD, generator=generator)

    with torch.inference_mode():
        if ranks is None:
            for name, tensor in named_tensors(weights).items():
                draw(name, tensor)
        else:
            whole = allocate_weights(model, dtype, torch.device("meta"), adapter.names)
            slices = own_slices(whole, weights, ranks.place)
            for name, tensor in named_tensors(whole).items():
                drawn = draw(name, torch.empty_like(tensor, device=device))
                for part in (each for each in slices if each.name == name):
                    part.target.copy_(part.of(drawn))
        return _decoder(model, in_halves(own, weights), weights, ranks)


def is_harmless(model: ModelSpecification, name: str) -> bool:
    """Surplus tensors that older checkpoints hold and no model needs."""
    if name == "lm_head.weight":
        return model.tie_word_embeddings
    return name.endswith(("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"))
