"""Small encoders of transformers in fp32, with every weight random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHARED: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "num_labels": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {"pad_token_id": 0},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1},
    "Camembert": {"type_vocab_size": 1},
    "MPNet": {},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0},
    "ModernBert": {
        "local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "mean",
        "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
    },
}  # fmt: skip


def make_encoder(family: str, form: str = "Model", **changes: Any) -> Any:
    """form: ``Model`` or ``ForSequenceClassification``."""
    config = getattr(transformers, f"{family}Config")(**SHARED | FAMILIES[family] | changes)
    torch.manual_seed(len(family))
    model = getattr(transformers, f"{family}{form}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
    return model.float().eval()


def write_encoder(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
