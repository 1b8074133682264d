"""Tiny random checkpoints, written by transformers' own ``save_pretrained``."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from msgspec.structs import replace

from penstock.kernels.block_pattern import BlockPattern
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.specification import Layer, ModelSpecification
from penstock.services.worker.models.weights import allocate_weights, named_tensors

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
WINDOWS = {"sliding_window": 40, "num_hidden_layers": 4}
HALF_WINDOWS: dict[str, Any] = {
    **WINDOWS,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * i for i in range(6)],
    "long_factor": [1.0 + 0.5 * i for i in range(6)],
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 0.75,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", WINDOWS),
    "mistral-nemo": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "ministral": ("Ministral", HALF_WINDOWS | {"head_dim": 16}),
    "qwen2-windows": ("Qwen2", HALF_WINDOWS | {"use_sliding_window": True}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": ("Gemma2", {"head_dim": 24, "sliding_window": 40, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 100, "pad_token_id": 0}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512, "pad_token_id": 0},
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "olmo3": ("Olmo3", {"sliding_window": 40, "num_hidden_layers": 4, "pad_token_id": 0}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
    ),
    "granite-swa": (
        "GraniteSWA",
        {
            "sliding_window": 40,
            "num_hidden_layers": 5,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "layer_rope_theta": [0, 1e4, 1e4, 5e5, 0],
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {"sliding_window": 60}),
    "exaone4": ("Exaone4", {"sliding_window": 40, "num_hidden_layers": 4}),
    "cohere": ("Cohere", {"use_qk_norm": True, "pad_token_id": 0, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"sliding_window": 40, "num_hidden_layers": 4, "pad_token_id": 0}),
}
"""One of each family that Llama's and Qwen's layers are not enough for."""
LLAMA4: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "no_rope_layers": [1, 1, 0, 1, 0],
    "attention_chunk_size": 24,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "intermediate_size_mlp": 112,
    "pad_token_id": 0,
}
"""Chunks; temperatures of queries in layers without rotary embedding."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_positions": 1024}),
    "gpt2-scales": ("GPT2", {"n_positions": 1024, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-bigcode": ("GPTBigCode", {"n_positions": 1024}),
    "opt": ("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 112, "pad_token_id": 0}),
    "phi": ("Phi", {}),
    "stablelm": ("StableLm", {}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {"pad_token_id": 0}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "pad_token_id": 0}),
    "arcee": ("Arcee", {}),
    "helium": ("Helium", {"head_dim": 16, "pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 40}),
    "cwm": ("Cwm", {"sliding_window": 40, "num_hidden_layers": 4, "head_dim": 16}),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "sliding_window": 40, "num_hidden_layers": 4},
    ),
    "llama4": ("Llama4", LLAMA4 | {"moe_layers": []}),
    "llama4-experts": ("Llama4", LLAMA4 | {"moe_layers": [1, 2], "num_local_experts": 4}),
    "jetmoe": ("JetMoe", {"kv_channels": 16, "num_local_experts": 4, "pad_token_id": 0}),
}
"""Models that transformers' own code computes."""
DECODER: dict[str, Any] = {
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 112,
    "pad_token_id": 0,
    "is_decoder": True,
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4, "max_position_embeddings": None}),
    "falcon": ("Falcon", {"max_position_embeddings": None}),
    "mamba": ("Mamba", {"max_position_embeddings": None}),
    "jamba": ("Jamba", {}),
    "gptj": ("GPTJ", {"n_positions": 1024, "rotary_dim": 8}),
    "doge": ("Doge", {"pad_token_id": 0}),
    "phimoe-window": ("Phimoe", {"num_local_experts": 4, "sliding_window": 40, "pad_token_id": 0}),
    "bart": ("Bart", DECODER),
    "mbart": ("MBart", DECODER),
    "pegasus": ("Pegasus", DECODER),
    "blenderbot": ("Blenderbot", DECODER),
    "deepseek-v3": ("DeepseekV3", {}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-biased": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
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
    "llama-320": ("Llama", {"tie_word_embeddings": False, "head_dim": 320}),
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


SIBLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": (
        "Llama",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "falcon3": (
        "Llama",
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000042.0}},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral-v0.3": (
        "Mistral",
        {
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen2.5": (
        "Qwen2",
        {
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "hidden_size": 112,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "gemma3-1b": (
        "Gemma3",
        {"head_dim": 32, "num_key_value_heads": 1, "sliding_window": 40, "num_hidden_layers": 7},
    ),
    "phi3-mini": ("Phi3", {"num_key_value_heads": 4, "sliding_window": 100, "pad_token_id": 0}),
    "phi4": (
        "Phi3",
        {
            "sliding_window": None,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
        },
    ),
    "phi4-mini": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 512,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo3-yarn": (
        "Olmo3",
        {
            "sliding_window": 40,
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cohere-plain": ("Cohere", {"use_qk_norm": False, "pad_token_id": 0, "logit_scale": 0.25}),
}
"""Further models of the same families, in what sets them apart from those above."""
DEEP: dict[str, tuple[str, dict[str, Any]]] = {
    f"{variant}-deep": (VARIANTS[variant][0], VARIANTS[variant][1] | {"num_hidden_layers": 4})
    for variant in ("llama3", "qwen2", "qwen3")
}
"""Layers of which three stages have 2, 1 and 1."""
DEEP["gemma2-deep"] = (FAMILIES["gemma2"][0], FAMILIES["gemma2"][1] | {"num_hidden_layers": 4})


def make_model(variant: str) -> Any:
    """The transformers model in fp32, with every weight random: also norms and biases."""
    family, changes = (VARIANTS | FAMILIES | SIBLINGS | OTHERS | REFUSED | DEEP)[variant]
    of_text = "Text" if family in ("Gemma3", "Llama4") else ""
    kind = f"{family}{of_text}Config"
    settings = {k: v for k, v in (SHARED | changes).items() if v is not None or k not in SHARED}
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(len(variant) * 7919 + ord(variant[-1]))
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(config)
    if getattr(config, "attn_logit_softcapping", None):
        # torch's attention knows no soft cap; transformers 5.17 takes it all the same.
        model.set_attn_implementation("eager")
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


def generated(
    variant: str,
    prompts: list[list[int]],
    count: int,
    guesses: list[list[int]] | None = None,
) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time. guesses: what they may be. One
    pass over a prompt and its guess shows whether transformers chooses each token of it, in a
    tenth of the time; where it does not, it generates."""
    model, outputs = _reference(variant), []
    for place, prompt in enumerate(prompts):
        if guesses is not None and _are_chosen(model, prompt, guesses[place], count):
            outputs.append(guesses[place])
            continue
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


@functools.lru_cache(maxsize=4)
def _reference(variant: str) -> Any:
    """What ``generated`` asks."""
    model = make_model(variant)
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model


def _are_chosen(model: Any, prompt: list[int], guess: list[int], count: int) -> bool:
    """Whether so many tokens are the likeliest ones, each behind the prompt and those before it."""
    if len(guess) != count:
        return False
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + guess[:-1]])).logits[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == guess)


def seen_through_blocks(model: ModelSpecification, window: int) -> ModelSpecification:
    """The model with a window in each layer, beside which all blocks are seen."""

    def changed(layer: Layer) -> Layer:
        every = BlockPattern(every=1)
        return replace(layer, attention=replace(layer.attention, window=window, besides=every))

    return replace(model, layers=tuple(changed(layer) for layer in model.layers))


def with_a_larger_layer(
    model: ModelSpecification, *, width: int = 0, kv_heads: int = 0
) -> ModelSpecification:
    """The model whose second layer has an MLP by so much wider, and so many KV heads more, with as
    many query heads to each as before."""
    first, second, *others = model.layers
    attention, mlp = second.attention, second.mlp
    shared = attention.num_heads // attention.num_kv_heads
    attention = replace(
        attention,
        num_heads=attention.num_heads + shared * kv_heads,
        num_kv_heads=attention.num_kv_heads + kv_heads,
    )
    second = replace(second, attention=attention, mlp=replace(mlp, width=mlp.width + width))
    return replace(model, layers=(first, second, *others))


def enlarged(model: Decoder, **more: int) -> Decoder:
    """A model with a larger layer (``with_a_larger_layer``) that gives the same logits: what is
    more of it is random and adds nothing."""
    larger = with_a_larger_layer(model.specification, **more)
    weights = allocate_weights(larger, model.dtype, model.device, model.weights.names)
    before = named_tensors(model.weights)
    for name, tensor in named_tensors(weights).items():
        tensor.normal_()
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        tensor[tuple(map(slice, before[name].shape))] = before[name]
    return Decoder(larger, weights)
