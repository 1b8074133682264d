"""Qwen3 in plain torch, for training: the same tensors and names as transformers writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from penstock.loadtest.models.make_model import ModelShape, model_config


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes in counts of numbers; the defaults make 8.9 million parameters."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 10
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as Hugging Face lays it out: halves, not pairs. x: [b, heads, s, dim]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with a norm over each query and key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """x: [b, s, hidden]; mask: a ``BlockMask``, or bool [b, 1, s, s]."""
        b, s, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, s, -1, self._dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, s, -1, self._dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self._dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        v = v.to(q.dtype)
        if isinstance(mask, Tensor):
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            from torch.nn.attention.flex_attention import flex_attention

            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, s, -1))
        return projected


def dense_mask(documents: Tensor) -> Tensor:
    """bool [b, 1, s, s] of int [b, s]."""
    s = documents.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def block_mask(documents: Tensor) -> Any:
    """The same for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, k]) & (q >= k)

    b, s = documents.shape
    return create_block_mask(visible, b, None, s, s, device=documents.device)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Norm, attention, norm, MLP, each added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """x: [b, s, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Qwen3(nn.Module):
    """``Qwen3ForCausalLM`` with tied embeddings. Its ``state_dict`` lacks only ``model.``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(
            torch.arange(shape.max_position_embeddings, dtype=torch.float32),
            shape.rope_theta**-half,
        )
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        depth = (2 * self.shape.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (depth if deep else 1.0))

    def hidden(self, ids: Tensor, mask: Any) -> Tensor:
        """ids: int [b, s]; [b, s, hidden] after the last norm."""
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as it will be served
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.norm(x)
        return out

    def forward(self, ids: Tensor, labels: Tensor, documents: Tensor, *, flex: bool) -> Tensor:
        """The mean cross entropy over the labels that are not ignored (-100).

        All int [b, s]; a token sees those before it in its own document. ``flex``: by
        FlexAttention, which is fast when compiled for a GPU and not meant for anything else.
        """
        mask = block_mask(documents) if flex else dense_mask(documents)
        logits = functional.linear(self.hidden(ids, mask), self.embed_tokens.weight)
        return functional.cross_entropy(
            logits.view(-1, self.shape.vocab_size).float(), labels.reshape(-1)
        )


def config_json(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """``config.json`` as transformers 5 writes it."""
    sizes = dataclasses.asdict(shape)
    eps, theta = sizes.pop("rms_norm_eps"), sizes.pop("rope_theta")
    config = model_config(ModelShape(architecture="qwen3", dtype="bfloat16", **sizes), eos)
    rope = {"rope_theta": theta, "rope_type": "default"}
    return config | {"pad_token_id": pad, "rms_norm_eps": eps, "rope_parameters": rope}
