"""Models of a few layers with random weights, whose heads have the sizes of published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SHARED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 511,
    "bos_token_id": 510,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = {"sliding_window": 40}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
PUBLISHED_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", WINDOW | {"head_dim": 256, "num_hidden_layers": 7}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
    "olmo3": ("Olmo3", WINDOW | {"num_key_value_heads": 4}),
    "granite": ("Granite", MULTIPLIERS | {"attention_multiplier": 1 / 128}),
    "granite-64": (
        "Granite",
        MULTIPLIERS | {"num_attention_heads": 8, "attention_multiplier": 1 / 64},
    ),
    "granite-swa": (
        "GraniteSWA",
        WINDOW | {"layer_rope_theta": [0, 1e4, 5e5, 0], "attention_multiplier": 0.088},
    ),
    "smollm3": ("SmolLM3", {}),
    "glm": ("Glm", {"head_dim": 128}),
    "glm4": ("Glm4", {"head_dim": 128}),
    "starcoder2": ("Starcoder2", {"sliding_window": 60}),
    "exaone4": ("Exaone4", WINDOW),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-qk-norm": ("Cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("Cohere2", WINDOW | {"logit_scale": 0.25}),
}


def write_published_heads(variant: str, folder: Path) -> Path:
    """In bfloat16. Products keep the size of what they multiply, so that logits in bfloat16 stay
    near those in float32."""
    family, changes = PUBLISHED_HEADS[variant]
    kind = f"{family}{'Text' if family == 'Gemma3' else ''}Config"
    config = getattr(transformers, kind)(**SHARED | changes)
    torch.manual_seed(len(variant))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    plus_one = family == "Gemma3"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter) + (not plus_one))
            elif parameter.dim() == 2 and not isinstance(
                model.get_submodule(name.rpartition(".")[0]), nn.Embedding
            ):
                parameter.copy_(parameter.shape[1] ** -0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    model.bfloat16().save_pretrained(folder)
    return folder
