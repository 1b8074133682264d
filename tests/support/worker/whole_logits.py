"""Logits of one sequence, by our layers and by transformers, from the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.worker.tiny_models import some_prompts
from torch import Tensor

from penstock.protocol.model_info import read_model_info
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.causal_model import StepInputs

CPU = torch.device("cpu")
READ_BY_NEWER = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="older versions of transformers read these settings in another way",
)
IDS = some_prompts([120], seed=3)[0]


def our_logits(
    folder: Path,
    loaded: Callable[[LoadReport], None] = lambda report: None,
    longest: int | None = None,
) -> Tensor:
    """[N, vocab] fp32, with attention written out in torch. longest: sequences are for."""
    info = read_model_info(folder)
    model = load_model(info, torch.float32, CPU, lambda note: None, loaded, longest)
    model.prepare(info.max_model_len)
    positions = torch.arange(len(IDS))

    def attend(
        layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        cache = model.caches[layer]
        shared = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(shared, 1) for each in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query, keys) * cache.score_scale
        if cache.softcap:
            scores = cache.softcap * torch.tanh(scores / cache.softcap)
        distance = positions[:, None] - positions
        hidden = distance < 0
        if cache.window:
            hidden |= distance >= cache.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(-1, 1, 1).expand(-1, len(query), -1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : len(key)]
        return torch.einsum("hnm,mhd->nhd", weights, values).flatten(1)

    with torch.inference_mode():
        step = StepInputs(torch.tensor(IDS), positions, attend, None)
        return model.logits(model.hidden(step, None), None).float()


def their_logits(folder: Path) -> Tensor:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def assert_alike(folder: Path, longest: int | None = None) -> None:
    """Logits are those of transformers but for rounding."""
    ours = our_logits(folder, longest=longest)
    torch.testing.assert_close(ours, their_logits(folder), rtol=1e-3, atol=1e-3)


def configured(source: Path, folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """A copy of a folder with another ``config.json``."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    for key in remove:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
