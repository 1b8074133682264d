"""What must be settled before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported,
    # which torch and transformers may do at any moment, and whenever a kernel is declared.
    os.environ["TRITON_INTERPRET"] = "1"
