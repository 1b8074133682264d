"""Tiny random EAGLE-3 heads for the models of ``tiny_models``, and what one computes, plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB = 64, 96, 4, 2, 16, 307
CAPTURED = [0, 1, 1]
EPS, THETA = 1e-5, 10000.0


def tensors_of(draft_vocab: int = 100, seed: int = 0) -> dict[str, Tensor]:
    """By their names in the files."""
    source = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source) * shape[-1] ** -0.5

    layer = {
        "self_attn.q_proj": (HEADS * DIM, 2 * HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, 2 * HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    found = {f"midlayer.{name}.weight": drawn(*shape) for name, shape in layer.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        found[f"midlayer.{name}.weight"] = 1 + 0.1 * drawn(HIDDEN)
    found |= {"norm.weight": 1 + 0.1 * drawn(HIDDEN), "fc.weight": drawn(HIDDEN, 3 * HIDDEN)}
    found["lm_head.weight"] = drawn(draft_vocab, HIDDEN)
    ids = torch.randperm(VOCAB, generator=source)[:draft_vocab].sort().values
    found["d2t"] = ids - torch.arange(draft_vocab)
    found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return found


def write_head(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 1024, "rms_norm_eps": EPS,
        "draft_vocab_size": len(tensors["lm_head.weight"]), "rope_theta": THETA,
        "eagle_aux_hidden_state_layer_ids": CAPTURED, **settings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class PlainHead:
    """The same in a few lines of fp32, over whole sequences."""

    def __init__(self, tensors: dict[str, Tensor], target: Any) -> None:
        """target: a model of transformers."""
        self._tensors, self._target = tensors, target

    def _weight(self, name: str) -> Tensor:
        return self._tensors.get(f"midlayer.{name}.weight", self._tensors.get(f"{name}.weight"))  # type: ignore[return-value]

    def features(self, tokens: list[int]) -> Tensor:
        """[len(tokens), hidden]."""
        with torch.no_grad():
            out = self._target(torch.tensor([tokens]), output_hidden_states=True)
        return torch.cat([out.hidden_states[one][0] for one in CAPTURED], -1) @ self._weight("fc").T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, (HIDDEN,), self._weight(name), EPS)

    def _heads(self, name: str, x: Tensor, positions: Tensor | None) -> Tensor:
        """[heads, N, D]."""
        y = (x @ self._weight(f"self_attn.{name}_proj").T).view(len(x), -1, DIM).transpose(0, 1)
        if positions is None:
            return y
        angle = positions[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        return y * cos + torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), -1) * sin

    def inputs(self, tokens: list[int], features: Tensor) -> Tensor:
        """Of positions 1 …; features: of those before them."""
        table = self._target.get_input_embeddings().weight.detach()
        embedded = embedding(torch.tensor(tokens[1:]), table)
        normed = self._norm("hidden_norm", features)
        return torch.cat((self._norm("input_layernorm", embedded), normed), -1)

    def keys_values(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """[Hkv, len(tokens) - 1, D] each."""
        x, positions = self.inputs(tokens, features), torch.arange(1, len(tokens))
        return self._heads("k", x, positions), self._heads("v", x, None)

    def last(self, tokens: list[int], features: Tensor) -> tuple[Tensor, int]:
        """The result at the last position, and the token that it drafts."""
        x, at = self.inputs(tokens, features), torch.tensor([len(tokens) - 1])
        keys, values = (
            each.repeat_interleave(HEADS // KV_HEADS, 0)
            for each in self.keys_values(tokens, features)
        )
        scores = self._heads("q", x[-1:], at) @ keys.transpose(1, 2) * DIM**-0.5
        attended = (scores.softmax(-1) @ values).transpose(0, 1).reshape(1, -1)
        hidden = features[-1:] + attended @ self._weight("self_attn.o_proj").T
        y = self._norm("post_attention_layernorm", hidden)
        up = silu(y @ self._weight("mlp.gate_proj").T) * (y @ self._weight("mlp.up_proj").T)
        hidden = hidden + up @ self._weight("mlp.down_proj").T
        logits = self._norm("norm", hidden) @ self._weight("lm_head").T
        best = int(logits.argmax())
        return hidden, best + int(self._tensors["d2t"][best])

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy ones behind a text of which the last token is not computed by the target yet."""
        features, text = self.features(tokens[:-1]), list(tokens)
        for _ in range(count):
            hidden, token = self.last(text, features)
            features, text = torch.cat((features, hidden)), [*text, token]
        return text[len(tokens) :]
