"""An EAGLE-3 head in plain torch, for training, and the files that such heads are published as."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.demo.training.model import MLP, Qwen3, RMSNorm, Shape, rotate
from penstock.loadtest.models.make_model import write_json


def captured_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers ahead of which the residual stream of the target is read."""
    return 2, num_layers // 2, num_layers - 3


class Keys:
    """Keys and values of the rows of one pass over a text, [b, heads, s, dim]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def shifted(self, count: int) -> tuple[Tensor, Tensor]:
        """Of the row so many positions before each."""
        return tuple(torch.roll(each, count, 2) for each in (self.keys, self.values))  # type: ignore[return-value]


class DraftHead(nn.Module):
    """``fc``, one layer over a token's embedding beside features, and an LM head of few tokens:
    Li et al., *EAGLE-3*, 2025. Row p reads token p and the features of position p - 1."""

    def __init__(self, target: Qwen3, ids: Tensor, width: int) -> None:
        """ids: int64, ascending: the tokens that it drafts; width: of its MLP."""
        super().__init__()
        shape = target.shape
        self.shape = Shape(
            hidden_size=shape.hidden_size, num_layers=1, num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, intermediate_size=width,
            vocab_size=shape.vocab_size, rope_theta=shape.rope_theta,
            max_position_embeddings=shape.max_position_embeddings,
        )  # fmt: skip
        size, dim = shape.hidden_size, shape.head_dim
        self.ids, self.layers = ids, captured_layers(shape.num_layers)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.q_proj = nn.Linear(2 * size, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * size, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * size, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, size, bias=False)
        self.mlp = MLP(self.shape)
        norms = (RMSNorm(size, shape.rms_norm_eps) for _ in range(4))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = norms
        self.lm_head = nn.Linear(size, len(ids), bias=False)
        self._target = [target]  # whose parameters are not this module's
        with torch.no_grad():
            self.lm_head.weight.copy_(target.embed_tokens.weight[ids])

    def forward(
        self, ids: Tensor, features: Tensor, seen: Tensor, before: list[Keys]
    ) -> tuple[Tensor, Keys]:
        """Results [b, s, hidden], and the keys of this pass.

        ids: [b, s]; features: [b, s, hidden] of the positions before them; seen: bool [b, 1, s, s],
        the rows of the first pass that each sees; before: of the passes before this one. A row of
        pass j sees the first pass up to j - 1 positions before it, then one row of each later pass.
        """
        target, (b, s) = self._target[0], ids.shape
        cos, sin = target.cos[:s], target.sin[:s]
        embedded = self.input_layernorm(target.embed_tokens(ids))
        x = torch.cat((embedded, self.hidden_norm(features)), -1)
        query, key, value = (
            projection(x).view(b, s, -1, self.shape.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        shared = self.shape.num_heads // self.shape.num_kv_heads
        key, value = (each.repeat_interleave(shared, 1) for each in (rotate(key, cos, sin), value))
        query = rotate(query, cos, sin) * self.shape.head_dim**-0.5
        passes = [*before, Keys(key, value)]
        scores = (query @ passes[0].keys.transpose(2, 3)).masked_fill(~seen, -torch.inf)
        later = [each.shifted(len(before) - at) for at, each in enumerate(passes)][1:]
        columns = [(query * keys).sum(-1, keepdim=True) for keys, _ in later]
        weights = torch.cat((scores, *columns), -1).softmax(-1)
        out = weights[..., :s] @ passes[0].values
        for at, (_, values) in enumerate(later):
            out = out + weights[..., s + at : s + at + 1] * values
        hidden = features + self.o_proj(out.transpose(1, 2).reshape(b, s, -1))
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden, passes[-1]

    def logits(self, hidden: Tensor) -> Tensor:
        """[…, len(ids)]."""
        found: Tensor = self.lm_head(self.norm(hidden))
        return found

    def save(self, folder: Path) -> int:
        """Write the files in bfloat16. Returns the bytes of the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        outside = ("fc.", "norm.", "lm_head.")
        tensors = {}
        for name, parameter in self.named_parameters():
            part = name if "_proj" not in name or name.startswith("mlp") else f"self_attn.{name}"
            prefix = "" if name.startswith(outside) else "midlayer."
            tensors[prefix + part] = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        tensors["d2t"] = self.ids - torch.arange(len(self.ids))
        drafted = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        tensors["t2d"] = drafted.index_fill(0, self.ids, True)
        file, shape = folder / "model.safetensors", self.shape
        save_file(tensors, file, metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
            "attention_bias": False, "draft_vocab_size": len(self.ids), "dtype": "bfloat16",
            "head_dim": shape.head_dim, "hidden_act": "silu", "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1,
            "max_position_embeddings": shape.max_position_embeddings,
            "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
            "rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta,
            "vocab_size": shape.vocab_size,
        }  # fmt: skip
        write_json(folder / "config.json", config)
        return file.stat().st_size


def target_rows(target: Qwen3, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What a head learns from, of ids [b, s]: the residual stream ahead of its three layers
    [b, s, 3 * hidden], and the rows that the target's logits are made of [b, s, hidden]."""
    x = target.embed_tokens(ids)
    cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
    wanted, found = captured_layers(target.shape.num_layers), []
    for number, layer in enumerate(target.layers):
        if number in wanted:
            found.append(x)
        x = layer(x, cos, sin, mask)
    return torch.cat(found, -1), target.norm(x)


def passes_of(
    head: DraftHead, ids: Tensor, documents: Tensor, captured: Tensor, count: int
) -> list[tuple[Tensor, Tensor]]:
    """For each of ``count`` passes its logits [b, s, len(ids)], and which rows draft, bool [b, s].

    As drafts are made (training-time test): the rows of pass j read the results of pass j - 1 where
    the features of the target are not known yet. ids, documents: [b, s]; captured: of the target.
    """
    s = ids.shape[1]
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    numbers = torch.arange(s, device=ids.device).expand_as(documents)
    inside = numbers - (numbers * begins).cummax(1).values
    own = (documents[:, :, None] == documents[:, None]) & ~begins[:, None]
    features = torch.roll(head.fc(captured), 1, 1)
    keys: list[Keys] = []
    found = []
    for at in range(count):
        seen = own & torch.ones(s, s, dtype=torch.bool, device=ids.device).tril(-at)
        if at == 0:  # else nothing is seen where a text begins
            seen = seen | torch.diag_embed(begins)
        hidden, more = head(ids, features, seen[:, None], keys)
        keys.append(more)
        found.append((head.logits(hidden), (inside > at) & (documents > 0)))
        features = torch.roll(hidden, 1, 1)
    return found


def loss_of(head: DraftHead, logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross entropy against the target's distribution over the tokens that are drafted.
    logits: [n, len(ids)]; wanted: [n, vocab] of the target."""
    soft = wanted[:, head.ids].softmax(-1)
    return functional.cross_entropy(logits, soft)


def read(target: Qwen3, folder: Path) -> DraftHead:
    """A head that ``DraftHead.save`` wrote, in fp32."""
    tensors = load_file(folder / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head = DraftHead(target, ids, len(tensors["midlayer.mlp.up_proj.weight"]))
    weights = {
        name.removeprefix("midlayer.").removeprefix("self_attn."): tensor.float()
        for name, tensor in tensors.items()
        if name not in ("d2t", "t2d")
    }
    head.load_state_dict(weights)
    return head
