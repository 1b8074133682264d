"""Steps of an executor for CUDA devices that are launched and not yet collected."""

from __future__ import annotations

import msgspec
import torch

from penstock.kernels.gpu.logprobs import LogprobColumns
from penstock.protocol.wire.messages.steps import RowFailure
from penstock.services.worker.gpu.logprob_rows import AskedLogprobs
from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedStep
from penstock.services.worker.speculation.drafting import Guess
from penstock.services.worker.speculation.verification import Verified


class DraftsInFlight(msgspec.Struct):
    """The drafts of a step."""

    rows: DraftRows
    """Their tokens are known to the device alone."""
    later: IntArray
    """Those of ``rows`` that are drafts."""
    guesses: list[Guess]
    """Of the slots that have drafts."""
    more: torch.Tensor
    """[2, R] int32, as ``InFlight.result``: what they drew."""
    outcome: torch.Tensor
    """[2, C] int32, likewise: an ``Outcome`` of each guess."""
    logprobs: LogprobColumns | None = None
    """Of the rows of drafts, likewise; ``None``: none are wanted."""
    drafted: IntArray | None = None
    """How many drafts each slot had, and …"""
    verified: Verified | None = None
    """… what the step brings, once it is over."""
    drawn: IntArray | None = None
    """[rows], the token that each of ``rows`` drew, and …"""
    live: IntArray | None = None
    """… ``Outcome.live`` of each guess, likewise."""


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
    is_over: bool = False
    """Whether somebody has seen that it is, and …"""
    seconds: float = 0.0
    """… how long it took."""
    computed: PlannedStep | None = None
    """Kept where rows may have drafts."""
    drafts: DraftsInFlight | None = None
    pause: float = 0.0
    """Seconds that the device has idled for drafts: its launch waited for the step before it, or
    looked for drafts while there was nothing else to do."""
    idle: bool = False
    """Whether the device has idled ahead of it because there was nothing to do."""
