"""What the calls of one process have in common."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.protocol.config.server_fields import ServerConfig
from penstock.services.frontend.grpc.engine.tokenizer_files import TokenizerFiles
from penstock.services.frontend.grpc.receiving import Receiving, places_for


class RunningCalls:
    """How many calls are being answered, since when any is, and what they share."""

    def __init__(self, config: ServerConfig) -> None:
        self.count = 0
        """Until the status of each has gone out."""
        self.began = time.monotonic()
        self.receiving = Receiving(places_for(config.max_body_bytes))
        folder = config.grpc_tokenizer
        self.tokenizer = TokenizerFiles(Path(folder).expanduser()) if folder else None
