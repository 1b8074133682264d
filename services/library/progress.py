"""One line on standard error that says how far a call is."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

REFRESH_SECONDS = 0.2


class ProgressLine:
    """Counts finished prompts and output tokens; writes at most five times a second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._done = 0
        self._tokens = 0
        self._began = time.monotonic()
        self._written = 0.0

    def finished(self, tokens: int, prompts: int = 1) -> None:
        self._done += prompts
        self._tokens += tokens
        now = time.monotonic()
        if self._shown and (now - self._written > REFRESH_SECONDS or self._done == self._total):
            self._written = now
            rate = self._tokens / max(1e-9, now - self._began)
            sys.stderr.write(
                f"\r{self._done}/{self._total} prompts, {self._tokens} tokens, "
                f"{rate:.0f} tokens/s\x1b[K"
            )
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            sys.stderr.write("\n")
