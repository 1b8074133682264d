"""Adapters for the models of ``tiny_models``, and the weights into which they are merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.pipeline.adapter_folders import PREFIX

from penstock.protocol.config import Config
from penstock.protocol.config.fields import LoadingConfig, ModelConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.steps import (
    AdapterBrought,
    AdapterLoaded,
    BringAdapter,
    LoadAdapter,
)
from penstock.services.worker.adapters.adapter_loader import AdapterLoader
from penstock.services.worker.adapters.loading import load_adapters
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder

CPU = torch.device("cpu")


def modules_of(model: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every linear layer of a transformers model but the LM head."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def merge(model: Any, folder: Path, scale: Callable[[str], float] = lambda name: 2.0) -> Any:
    """Add scale * B A to the weights of a transformers model, as the paper has it."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in modules_of(model):
            down = tensors.get(f"{PREFIX}{name}.lora_A.weight")
            if down is not None:
                up = tensors[f"{PREFIX}{name}.lora_B.weight"]
                modules[name].weight += scale(name) * (up.double() @ down.double()).float()
    return model


def settings_for(model: Path, **adapters: Path) -> Config:
    lora = [f"{name}={path}" for name, path in adapters.items()]
    return Config(model=ModelConfig(model=str(model)), loading=LoadingConfig(lora=lora))


def bring(
    loader: AdapterLoader,
    digest: str,
    keeps: list[str] | None = None,
    beside: Callable[[], object] = lambda: None,
) -> AdapterBrought:
    """Bring an adapter into a place, beside those that are in theirs."""
    kept = list(loader.adapters.numbers) if keeps is None else keeps
    loader.bring(BringAdapter(1, digest, kept))
    while not (found := loader.brought()):
        assert not loader.finished()
        beside()
    return found[0]


def come(
    loader: AdapterLoader, folder: Path, beside: Callable[[], object] = lambda: None
) -> AdapterLoaded:
    """Load an adapter, and bring it into a place."""
    loader.load(LoadAdapter("one", str(folder)))
    while not (found := loader.finished()):
        beside()
    if found[0].digest:
        assert not bring(loader, found[0].digest, beside=beside).reason
    return found[0]


def adapted(model: Path, dtype: torch.dtype = torch.float32, **adapters: Path) -> Decoder:
    """A model with these adapters by name, not prepared yet."""
    decoder = load_model(read_model_info(model), dtype, CPU, lambda note: None)
    load_adapters(settings_for(model, **adapters), decoder)
    return decoder
