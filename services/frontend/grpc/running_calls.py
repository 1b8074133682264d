"""What the calls of one process have in common."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.protocol.config.server_fields import ServerConfig
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.grpc.engine.tokenizer_files import TokenizerFiles
from penstock.services.frontend.grpc.receiving import Receiving, places_for

MAX_UNTAKEN = 64
"""Answers that one caller may leave untaken."""


class UntakenCalls:
    """Calls that were given up because their clients take nothing. Each lasts until its client
    reads again or leaves, and gRPC keeps what was written last so long."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        """By whose they are."""

    @contextmanager
    def held(self, owner: str) -> Iterator[None]:
        """For the time of the block there is one more."""
        self._of[owner] += 1
        try:
            yield
        finally:
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]

    def count(self, owner: str) -> int:
        return self._of[owner]

    def check(self, owner: str) -> None:
        """Raises ``ApiError`` for a caller that has left too many."""
        if (count := self._of[owner]) >= MAX_UNTAKEN:
            raise ApiError(
                429,
                f"{count} answers of this caller were given up because nobody reads them, and wait "
                "still: close their connections",
                code="too_many_untaken",
            )


class RunningCalls:
    """How many calls are being answered, since when any is, and what they share."""

    def __init__(self, config: ServerConfig) -> None:
        self.count = 0
        """Until the status of each has gone out, or its client was given up."""
        self.untaken = UntakenCalls()
        self.began = time.monotonic()
        self.receiving = Receiving(places_for(config.max_body_bytes))
        folder = config.grpc_tokenizer
        self.tokenizer = TokenizerFiles(Path(folder).expanduser()) if folder else None
