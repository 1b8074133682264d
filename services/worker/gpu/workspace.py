"""Activations of a step on a CUDA device, in memory that is taken before the first."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from penstock.kernels.gpu.sampler_memory import vocab_splits
from penstock.services.worker.gpu.layer_attention import AttentionRows
from penstock.services.worker.models.dense import DenseConfig


class LogitsSpace(msgspec.Struct, kw_only=True):
    """Logits and what is drawn from them. R: logits rows; V: vocabulary."""

    logits: Tensor
    """[R, V]."""
    best: Tensor
    token: Tensor
    result: Tensor
    """[2, R] int32: tokens, and whether a row was not finite."""


class Workspace(LogitsSpace, kw_only=True):
    """Activations of the largest step. T: rows."""

    residual: Tensor
    """[T, hidden]."""
    normed: Tensor
    attention: AttentionRows
    projected: Tensor
    """[T, hidden]: what is added to the residual stream next."""
    gate_up: Tensor
    activated: Tensor

    @property
    def qkv(self) -> Tensor:
        """[T, Hq + 2 Hkv, D]."""
        return self.attention.qkv

    @property
    def attention_output(self) -> Tensor:
        """[T, Hq, D]."""
        return self.attention.output


def make_logits_space(
    vocab: int, rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The fields of a ``LogitsSpace`` of so many rows."""
    parts = rows * vocab_splits(vocab)
    return {
        "logits": torch.empty(rows, vocab, dtype=dtype, device=device),
        "best": torch.empty(parts, dtype=torch.float32, device=device),
        "token": torch.empty(parts, dtype=torch.int32, device=device),
        "result": torch.zeros(2, rows, dtype=torch.int32, device=device),
    }


def make_attention_rows(
    rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> AttentionRows:
    return AttentionRows(
        torch.empty(rows, heads + 2 * kv_heads, dim, dtype=dtype, device=device),
        torch.empty(rows, heads, dim, dtype=dtype, device=device),
        torch.zeros(rows, heads, dim, dtype=dtype, device=device),
    )


def make_workspace(
    config: DenseConfig, rows: int, logits_rows: int, dtype: torch.dtype, device: torch.device
) -> Workspace:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    hidden, kv_heads = config.hidden_size, config.num_kv_heads
    return Workspace(
        residual=empty(rows, hidden),
        normed=empty(rows, hidden),
        attention=make_attention_rows(
            rows, config.num_heads, kv_heads, config.head_dim, dtype, device
        ),
        projected=empty(rows, hidden),
        gate_up=empty(rows, 2 * config.intermediate_size),
        activated=empty(rows, config.intermediate_size),
        **make_logits_space(config.vocab_size, logits_rows, dtype, device),
    )
