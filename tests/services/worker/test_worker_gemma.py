"""What the three Gemmas read of ``config.json``: as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.tiny_models import make_model, some_prompts
from support.worker.whole_logits import READ_BY_NEWER, assert_alike, configured

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker.models.registry import adapter_for

Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        pytest.param("gemma", {"hidden_act": "gelu"}, marks=READ_BY_NEWER),
        ("gemma", {"hidden_act": "relu"}),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "relu"}),
        ("gemma2", {"hidden_activation": "relu"}),
        ("gemma3", {"attn_logit_softcapping": 5.0}),
        ("gemma3", {"final_logit_softcapping": 5.0}),
    ],
)
def test_settings_mean_what_they_mean_to_transformers(
    variant: str, changes: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    assert_alike(configured(tiny_folder(variant), tmp_path / "model", **changes))


@pytest.mark.parametrize("variant", ["gemma", "gemma2", "gemma3"])
def test_attention_in_both_directions_is_refused(
    variant: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = configured(tiny_folder(variant), tmp_path / "m", use_bidirectional_attention=True)
    info = read_model_info(folder)
    with pytest.raises(BadModelFolder, match="use_bidirectional_attention"):
        adapter_for(info).specification(info)


def test_the_model_to_compare_gemma2_with_caps_its_scores() -> None:
    """Torch's attention, which transformers 5.17 takes unless told otherwise, would not."""
    model, prompt = make_model("gemma2"), torch.tensor(some_prompts([9]))
    found = []
    for cap in (50.0, 0.5):
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = cap
        with torch.inference_mode():
            found.append(model(prompt).logits)
    assert (found[0] - found[1]).abs().max() > 0.01
