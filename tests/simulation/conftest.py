"""What a simulated process must not do to the process that simulates it."""

from __future__ import annotations

import pytest

from penstock.protocol.process import garbage
from penstock.services.worker import pauses


@pytest.fixture(autouse=True)
def _untouched_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A collection takes longer here than all else in a simulated second, and what is frozen would
    # never be freed.
    monkeypatch.setattr(garbage, "settle", lambda: None)
    monkeypatch.setattr(pauses, "give_back_freed", lambda: None)
