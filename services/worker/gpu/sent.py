"""Arrays of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def sent(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    host = torch.from_numpy(values.copy())
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
