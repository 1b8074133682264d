"""Tiny random models written by transformers' own `save_pretrained`, and what they answer.

Their tokenizer spells token n as `⟨n⟩`, so that an answer's text names its token ids.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 320
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.12,
}


def _model(architecture: str) -> transformers.PreTrainedModel:
    if architecture == "qwen3":
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True)
        )
    if architecture == "qwen2":
        return transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=False)
        )
    if architecture == "llama":
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
        config = transformers.LlamaConfig(
            **_SHAPE, tie_word_embeddings=False, rope_parameters=scaling
        )
        return transformers.LlamaForCausalLM(config)
    if architecture == "gemma3":
        layers = {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
        return transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**(_SHAPE | layers), head_dim=16, sliding_window=100)
        )
    if architecture == "gemma2":
        return transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**_SHAPE, head_dim=16, sliding_window=40)
        )
    if architecture == "gpt-neox":
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_SHAPE))
    raise ValueError(architecture)


def write_model(architecture: str, folder: Path) -> Path:
    """A folder as users have it: config, weights, tokenizer. Norms and biases are not neutral."""
    torch.manual_seed(11)
    model = _model(architecture).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    words = {f"⟨{number}⟩": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="⟨0⟩"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("⟩", "merged_with_previous")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    # The class that takes the file as it stands. Without it each tokenizer process asks
    # transformers, which takes seconds (and for qwen2 it does so nevertheless).
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def spell(ids: list[int]) -> str:
    return "".join(f"⟨{number}⟩" for number in ids)


def ids_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"⟨(\d+)⟩", text)]


def transformers_choices(
    folder: Path, prompts: list[list[int]], outputs: list[list[int]]
) -> list[list[int]]:
    """The likeliest token after each prompt and after each token of its output but the last, by
    transformers in float32: the outputs themselves if and only if they are its greedy ones."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    choices = []
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
            choices.append(logits.argmax(-1).tolist())
    return choices
