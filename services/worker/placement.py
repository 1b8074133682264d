"""Where a model computes and in which dtype, by the names that people know."""

from __future__ import annotations

import torch


def placement(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The names of both: ``("cpu", "bfloat16")``, ``("NVIDIA H100 80GB HBM3", "bfloat16")``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, str(dtype).removeprefix("torch.")
