"""Parts of modelling code that is not ours, computed by our kernels where that gives the same.

Written in torch an RMSNorm is eight kernels and a rotary embedding ten; of what a decode step of a
usual decoder launches they are two thirds. What is found is tried on random rows first, and stays
as it is if the results differ by more than rounding, or if Triton does not work.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.gpu.cache_keys import make_keys_stable
from penstock.kernels.gpu.norm import rms_norm
from penstock.kernels.gpu.rotate_heads import rotate_heads

_ROWS = 8
_TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}
"""Relative to the largest number of a row: two roundings, where code rounds what is in between."""
_ROTARY = "apply_rotary_pos_emb"
"""What modelling files call the function that rotates queries and keys."""


class _KernelNorm:
    """In place of a module's ``forward``."""

    def __init__(self, module: Any, factor: Tensor, eps: float) -> None:
        self._forward, self._factor, self._eps = module.forward, factor, eps

    def __call__(self, x: Tensor, *others: Any, **named: Any) -> Any:
        if others or named:
            return self._forward(x, *others, **named)
        rows = x.reshape(-1, len(self._factor)).contiguous()
        out = torch.empty_like(rows)
        rms_norm(rows, self._factor, self._eps, out)
        return out.view(x.shape)


class _KernelRotary:
    """In place of a modelling file's function; queries and keys: [1, H, N, D], on this device.

    Other models of the file may be on a device that Triton does not reach.
    """

    def __init__(self, function: Any, device: torch.device) -> None:
        self.function, self._device_type = function, device.type

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
    ) -> Any:
        rows = (1, q.shape[-2], q.shape[-1])
        usual = q.ndim == 4 and len(q) == 1 and cos.shape == sin.shape == rows
        reached = q.device.type == sin.device.type == self._device_type
        if others or named or not usual or not reached:
            return self.function(q, k, cos, sin, *others, **named)
        query, key = (each[0].transpose(0, 1) for each in (q, k))
        rotated = rotate_heads(query, key, cos[0], sin[0])
        return tuple(each.transpose(0, 1)[None] for each in rotated)


def use_kernels(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """Let our kernels compute norms and rotary embedding where they give the same; says what.

    dtype: of the rows. The rotary embedding is a function of the modelling file, so that every
    other model of it in this process has the kernel, too.
    """
    if dtype not in _TOLERANCE:
        return ""
    make_keys_stable()
    norms = 0
    with torch.inference_mode():
        for module in model.modules():
            norm = _same_norm(module, dtype)
            if norm is not None:
                module.forward = norm
                norms += 1
        rotary = _use_kernel_rotary(model, dtype)
    found = [f"{norms} norms"] * bool(norms) + ["rotary embedding"] * rotary
    return " and ".join(found)


def _same_norm(module: Any, dtype: torch.dtype) -> _KernelNorm | None:
    """What gives the module's results; ``None`` if it is no RMSNorm, or another one."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    x = _random(1, _ROWS, len(weight))
    x[:, ::2] *= eps**0.5  # so small that eps counts
    x = x.to(weight.device, dtype)
    wanted = module(x)
    for factor in (weight, weight.float() + 1.0):
        norm = _KernelNorm(module, factor, eps)
        try:
            found = norm(x)
        except Exception:  # whatever Triton raises where it does not work
            return None
        if _alike(found, wanted):
            return norm
    return None


def _use_kernel_rotary(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether the modelling file's rotary embedding is our kernel now."""
    file = sys.modules[type(model).__module__]
    function = getattr(file, _ROTARY, None)
    if function is None or isinstance(function, _KernelRotary):
        return function is not None
    device = next(model.parameters()).device
    query, key = (_random(1, heads, _ROWS, 16).to(device, dtype) for heads in (4, 2))
    angles = _random(1, _ROWS, 8)
    cos, sin = (
        torch.cat((part, part), -1).to(device, dtype) for part in (angles.cos(), angles.sin())
    )
    kernel = _KernelRotary(function, device)
    try:
        wanted = function(query, key, cos, sin)
        found = kernel(query, key, cos, sin)
    except Exception:  # a function with other arguments, or a device on which Triton fails
        return False
    if len(wanted) != 2 or not all(map(_alike, found, wanted)):
        return False
    setattr(file, _ROTARY, kernel)
    return True


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _alike(found: Tensor, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor) or (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        return False
    difference = (found.float() - wanted.float()).abs().amax(-1)
    most = wanted.float().abs().amax(-1)
    return bool((difference <= _TOLERANCE[found.dtype] * most).all())
