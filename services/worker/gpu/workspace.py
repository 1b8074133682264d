"""Activations of a step on a CUDA device, in memory that is taken before the first."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from penstock.kernels.gpu.sampler_memory import vocab_splits
from penstock.services.worker.models.dense import DenseConfig


class Workspace(msgspec.Struct):
    """Activations of the largest step. T: rows; R: logits rows; V: vocabulary."""

    residual: Tensor
    """[T, hidden]."""
    normed: Tensor
    qkv: Tensor
    """[T, Hq + 2 Hkv, D]."""
    query: Tensor
    """[T, Hq, D]: rotated queries of chunk rows."""
    attention_output: Tensor
    """[T, Hq, D]: what attention gives."""
    projected: Tensor
    """[T, hidden]: what is added to the residual stream next."""
    gate_up: Tensor
    activated: Tensor
    logits: Tensor
    """[R, V]."""
    best: Tensor
    token: Tensor
    result: Tensor
    """[2, R] int32: tokens, and whether a row was not finite."""


def make_workspace(
    config: DenseConfig, rows: int, logits_rows: int, dtype: torch.dtype, device: torch.device
) -> Workspace:
    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device=device)

    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    parts = logits_rows * vocab_splits(config.vocab_size)
    return Workspace(
        residual=empty(rows, hidden),
        normed=empty(rows, hidden),
        qkv=empty(rows, heads + 2 * config.num_kv_heads, dim),
        query=empty(rows, heads, dim),
        attention_output=torch.zeros(rows, heads, dim, dtype=dtype, device=device),
        projected=empty(rows, hidden),
        gate_up=empty(rows, 2 * config.intermediate_size),
        activated=empty(rows, config.intermediate_size),
        logits=empty(logits_rows, config.vocab_size),
        best=empty(parts, kind=torch.float32),
        token=empty(parts, kind=torch.int32),
        result=torch.zeros(2, logits_rows, dtype=torch.int32, device=device),
    )
