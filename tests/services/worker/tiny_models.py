"""Tiny random checkpoints, written by transformers' own ``save_pretrained``."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

SHARED: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 306,
    "bos_token_id": 305,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-biases": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "qwen2-wide": ("Qwen2", {"hidden_size": 128, "intermediate_size": 256}),
    "llama3-wide": (
        "Llama",
        {"hidden_size": 128, "intermediate_size": 256, "rope_parameters": LLAMA3},
    ),
    "llama-80": ("Llama", {"tie_word_embeddings": False, "head_dim": 80}),
    "llama-many-heads": (
        "Llama",
        {
            "hidden_size": 132,
            "num_attention_heads": 66,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "tie_word_embeddings": False,
        },
    ),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
}


def make_model(variant: str) -> Any:
    """The transformers model in fp32, with every weight random: also norms and biases."""
    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**(SHARED | changes))
    torch.manual_seed(len(variant) * 7919 + ord(variant[-1]))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.float().eval()


def write_model(variant: str, folder: Path, **options: Any) -> Path:
    make_model(variant).save_pretrained(folder, **options)
    return folder


def some_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(length)] for length in lengths]


def generated(variant: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time."""
    model = make_model(variant)
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            full = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        outputs.append(full[0, len(prompt) :].tolist())
    return outputs
