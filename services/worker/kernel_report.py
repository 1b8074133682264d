"""What a compilation of a model's kernels came to."""

from __future__ import annotations

import msgspec

LIMIT_SECONDS = 300.0
"""For all kernels of a model, when a worker waits."""


class CompilationReport(msgspec.Struct):
    compiled: int = 0
    found: int = 0
    """In the cache already."""
    failures: list[str] = []
    processes: int = 0
    listed_seconds: float = 0.0
    """Until it was known which kernels are needed."""
    seconds: float = 0.0
    summary: str = ""
    """Which kernels were chosen, or why there are none."""
    slowest: list[tuple[str, float]] = []
    """The kernels that took the longest, with their seconds."""

    def __str__(self) -> str:
        """``53 kernels compiled in 14 processes in 9.1 s (listed after 4.0 s), 0 found``."""
        return (
            f"{self.compiled} kernels compiled in {self.processes} processes in "
            f"{self.seconds:.1f} s (listed after {self.listed_seconds:.1f} s), {self.found} found"
        )
