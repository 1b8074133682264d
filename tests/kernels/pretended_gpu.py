"""Let kernels believe that there is a GPU, Hopper or what ``CAPABILITY`` and ``SHARED_BYTES`` say:
they are compiled here, never run.

Import this before any module of ``penstock.kernels.gpu``.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch

CAPABILITY = int(os.environ.get("CAPABILITY", "90"))
SHARED_BYTES = int(os.environ.get("SHARED_BYTES", 227 * 1024))

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: divmod(CAPABILITY, 10)
torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
