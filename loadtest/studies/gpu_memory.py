"""The memory that GPUs have in use by the driver's count, once and while something happens."""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Self

LOOK_S = 0.1


def memory_in_use() -> list[int]:
    """MiB of each GPU, those that ``CUDA_VISIBLE_DEVICES`` names or all; empty where none is."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return [int(word) for word in found.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


class MemoryWatch:
    """Looks again and again within a ``with`` block. All three lists have an item for each GPU."""

    def __init__(self) -> None:
        self.before = memory_in_use()
        self.lowest, self.highest = list(self.before), list(self.before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        if self.before:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.before:
            self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            used = memory_in_use()
            if len(used) == len(self.before):
                self.lowest = list(map(min, self.lowest, used))
                self.highest = list(map(max, self.highest, used))
