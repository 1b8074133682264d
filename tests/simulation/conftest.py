"""What a simulated process must not do to the process that simulates it."""

from __future__ import annotations

import pytest

from penstock.services.scheduler import service as scheduler_service
from penstock.services.worker import service as worker_service


class Uncollected:
    """In the place of ``gc``: a collection takes longer here than all else in a simulated second,
    and what is frozen would never be freed."""

    def collect(self) -> None: ...

    def freeze(self) -> None: ...


@pytest.fixture(autouse=True)
def _untouched_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_service, "gc", Uncollected())
    monkeypatch.setattr(worker_service, "give_back_freed", lambda: None)
