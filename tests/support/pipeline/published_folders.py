"""Small folders with random weights that hold what Qwen3-Embedding, Qwen3-Reranker and
EmbeddingGemma were published with: the same files, keys, names of tensors, prompts and templates of
the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

QWEN3_PROMPTS = {
    "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query"
    "\nQuery:",
    "document": "",
}
GEMMA_PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "STS": "task: sentence similarity | query: ",
    "Retrieval-document": "title: none | text: ",
}
"""Some of its fourteen."""
HIDDEN, WIDE = 64, 96
_QWEN3_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SHARED: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "head_dim": 32,
}


def write_qwen3_embedding(folder: Path, *, tied: bool = True) -> Path:
    """Qwen3-Embedding-0.6B; not tied: the 8B, whose folder has no LM head all the same."""
    tokenizer = _qwen3_tokenizer()
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
            processors.TemplateProcessing(
                single="$A <|endoftext|>",
                pair="$A <|endoftext|> $B <|endoftext|>",
                special_tokens=[("<|endoftext|>", end)],
            ),
        ]
    )
    model = _qwen3(tokenizer, tied=tied)
    model.model.save_pretrained(folder)  # names without "model."
    _write_qwen3(folder, tokenizer, model.config)
    _write_modules(folder, QWEN3_PROMPTS, "Transformer", "Pooling", "Normalize")
    _write_pooling(folder, "lasttoken")
    return folder


def write_qwen3_reranker(folder: Path) -> Path:
    """Qwen3-Reranker-0.6B, a whole language model; its tokenizer appends nothing."""
    tokenizer = _qwen3_tokenizer()
    model = _qwen3(tokenizer, tied=True)
    model.save_pretrained(folder)
    _write_qwen3(folder, tokenizer, model.config)
    return folder


def write_embedding_gemma(folder: Path) -> Path:
    """EmbeddingGemma-300m: two dense modules behind the mean of layers that see both ways."""
    tokenizer = _gemma_tokenizer()
    torch.manual_seed(2)
    config = transformers.Gemma3TextConfig(
        **_SHARED, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256,
        query_pre_attn_scalar=32, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    _drawn(transformers.Gemma3TextModel(config)).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written |= {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "sliding_window": 20,  # both sides together: transformers halves it
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    _write(folder / "config.json", written)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"add_bos_token": True, "add_eos_token": True, "tokenizer_class": "GemmaTokenizer"}
    said |= {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write(folder / "tokenizer_config.json", said)
    _write_modules(folder, GEMMA_PROMPTS, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    _write_pooling(folder, "mean_tokens")
    for name, sizes in (("2_Dense", (HIDDEN, WIDE)), ("3_Dense", (WIDE, HIDDEN))):
        (folder / name).mkdir()
        dense = {"in_features": sizes[0], "out_features": sizes[1], "bias": False}
        dense |= {"activation_function": "torch.nn.modules.linear.Identity"}
        _write(folder / name / "config.json", dense)
        weight = torch.randn(sizes[1], sizes[0]) / sizes[0] ** 0.5
        save_file({"linear.weight": weight}, folder / name / "model.safetensors")
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    return folder


def _qwen3(tokenizer: Tokenizer, *, tied: bool) -> Any:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        **_SHARED, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024,
        tie_word_embeddings=tied, bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"), use_sliding_window=False,
    )  # fmt: skip
    return _drawn(transformers.Qwen3ForCausalLM(config))


def _drawn(model: Any) -> Any:
    """With norms that are not all alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval()


def _qwen3_tokenizer() -> Tokenizer:
    """Bytes, and the words by which Qwen3-Reranker judges; control tokens stand behind them."""
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "no", "ye", "yes"]
    merges = [("n", "o"), ("y", "e"), ("ye", "s")]
    tokenizer = Tokenizer(models.BPE(_numbered(known), merges))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in _QWEN3_CONTROL])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    return tokenizer


def _write_qwen3(folder: Path, tokenizer: Tokenizer, config: Any) -> None:
    written = json.loads((folder / "config.json").read_text())
    _write(folder / "config.json", written | {"architectures": ["Qwen3ForCausalLM"]})
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>"}
    said |= {"pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
    _write(folder / "tokenizer_config.json", said)


def _gemma_tokenizer() -> Tokenizer:
    """Letters, of which others are bytes."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    known = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    known += [chr(code) for code in range(33, 127)]
    model = models.BPE(_numbered(known), [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> <bos>:1 $B:1 <eos>:1",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in control])
    return tokenizer


def _numbered(known: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(known)}


def _write_modules(folder: Path, prompts: dict[str, str], *kinds: str) -> None:
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else "",
         "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]  # fmt: skip
    _write(folder / "modules.json", modules)
    said = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    _write(folder / "config_sentence_transformers.json", said)


def _write_pooling(folder: Path, mode: str) -> None:
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    modes += ("weightedmean_tokens", "lasttoken")
    said: dict[str, Any] = {f"pooling_mode_{one}": one == mode for one in modes}
    said |= {"word_embedding_dimension": HIDDEN, "include_prompt": True}
    _write(folder / "1_Pooling/config.json", said)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2))
