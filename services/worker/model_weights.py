"""Makes a model of a checkpoint folder: reads its weights, or draws random ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from penstock.protocol.config import Config
from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.models.adapter import may_be_zero, named_tensors
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.registry import adapter_for, is_native
from penstock.services.worker.models.specification import ModelSpecification, for_length
from penstock.services.worker.models.weights import allocate_weights, in_halves
from penstock.services.worker.weight_reading import PinnedBuffers

Progress = Callable[[str], None]
Loaded = Callable[[LoadReport], None]

DUMMY_STD = 0.02
"""Spread of random weights: as transformers initialises them."""


def make_model(
    config: Config,
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    loaded: Loaded,
) -> CausalModel:
    """The model that the configuration names; ``loaded`` is told what was read.

    One of our own families, or by transformers' modelling code. Raises ``BadModelFolder``.
    """
    random, seed = config.loading.load_format == "dummy", config.model.seed
    impl = config.model.model_impl
    if impl == "transformers" or (impl == "auto" and not is_native(info)):
        from penstock.services.worker.models.transformers_model import load_transformers_model

        progress("loading by transformers")
        return load_transformers_model(info, dtype, device, random=random, seed=seed)
    longest = config.model.max_model_len
    if random:
        return random_model(info, dtype, device, seed, longest)
    return load_model(info, dtype, device, progress, loaded, longest)


def load_model(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    loaded: Loaded = lambda report: None,
    longest: int | None = None,
) -> Decoder:
    """Check the whole checkpoint, then allocate and read the weights. longest: positions that a
    sequence may have, by default all that the model was trained for."""
    adapter = adapter_for(info)
    model = for_length(adapter.specification(info), longest or info.max_model_len)
    progress("checking the checkpoint")
    checkpoint = Checkpoint(Path(info.folder))
    # Pinned while the device starts and memory is taken for the weights.
    buffers = PinnedBuffers(checkpoint.total_bytes) if device.type == "cuda" else None
    expected = named_tensors(
        adapter.names, model, allocate_weights(model, dtype, torch.device("meta"))
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    checkpoint.check(shapes, lambda name: is_harmless(model, name))
    weights = allocate_weights(model, dtype, device)
    with torch.inference_mode():
        targets = named_tensors(adapter.names, model, weights)
        zero = may_be_zero(adapter.names, model)
        loaded(checkpoint.load(targets, progress, zero, buffers))
        model = in_halves(model, weights)
    return Decoder(model, weights)


def random_model(
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    longest: int | None = None,
) -> Decoder:
    """The model of ``config.json`` with random weights, drawn on the device; norms are 1. longest:
    see ``load_model``."""
    adapter = adapter_for(info)
    model = for_length(adapter.specification(info), longest or info.max_model_len)
    weights = allocate_weights(model, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.inference_mode():
        for name, tensor in named_tensors(adapter.names, model, weights).items():
            if "norm" in name and name.endswith(".weight"):
                tensor.fill_(0.0 if model.norm.plus_one else 1.0)
            else:
                tensor.normal_(0.0, DUMMY_STD, generator=generator)
        model = in_halves(model, weights)
    return Decoder(model, weights)


def is_harmless(model: ModelSpecification, name: str) -> bool:
    """Surplus tensors that older checkpoints hold and no model needs."""
    if name == "lm_head.weight":
        return model.tie_word_embeddings
    return name.endswith(("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"))
