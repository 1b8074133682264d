"""Let kernels believe that there is a GPU, Hopper or what ``CAPABILITY`` and ``SHARED_BYTES`` say:
they are compiled here, never run.

Import this before any module of ``penstock.kernels.gpu``.
"""

from __future__ import annotations

import os

from penstock.kernels.gpu.device_facts import USUAL_MULTIPROCESSORS, DeviceFacts, pretend

CAPABILITY = divmod(int(os.environ.get("CAPABILITY", "90")), 10)
SHARED_BYTES = int(os.environ.get("SHARED_BYTES", 227 * 1024))

pretend(DeviceFacts(CAPABILITY, SHARED_BYTES, USUAL_MULTIPROCESSORS))
