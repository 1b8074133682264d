"""What is known of a step that is under way on a GPU."""

from __future__ import annotations

import msgspec
import torch

from penstock.protocol.wire.messages.steps import RowFailure
from penstock.services.worker.gpu.logprob_rows import AskedLogprobs


class InFlight(msgspec.Struct):
    """A launched step."""

    epoch: int
    step: int
    rows: int
    result: torch.Tensor
    """[2, R] int32 on the host, once ``event`` has passed."""
    event: torch.cuda.Event | None
    launched: float
    drawn: dict[int, int] = {}
    """Slots with a grammar, which must see their token, and their rows."""
    noted: dict[int, int] = {}
    """Slots that ask what sequences came before, likewise."""
    failures: list[RowFailure] = []
    logprobs: AskedLogprobs | None = None
    begun: torch.cuda.Event | None = None
    """Recorded before the step's first kernel; only while the process is traced."""
