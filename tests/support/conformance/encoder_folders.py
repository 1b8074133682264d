"""Folders of small encoders with random weights and a tokenizer of their own, to be served beside
models that generate."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
LONGEST = 128
"""Tokens of a text, at most."""


def write_encoder(folder: Path, labels: int = 0) -> Path:
    """A BERT that makes vectors by the mean of a text's tokens, or with labels a classifier; with
    one label it scores pairs."""
    torch.manual_seed(labels)
    config = transformers.BertConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
        pad_token_id=0,
        num_labels=labels or 2,
        initializer_range=0.2,
    )
    kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
    kind(config).save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    if not labels:
        _write_modules(folder)
    return folder


def _tokenizer() -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return tokenizer


def _write_modules(folder: Path) -> None:
    """What sentence-transformers would have left."""
    names = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": place, "path": f"{place}_{name}" if place else "", "name": str(place),
         "type": f"sentence_transformers.models.{name}"}
        for place, name in enumerate(names)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
