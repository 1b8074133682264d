"""A second stream of the device, for work that another leaves room for."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """Runs two pieces of work of one stream side by side; on the CPU one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run(self, one: Callable[[], None], other: Callable[[], None]) -> None:
        """Both after what is on the present stream, both ahead of what follows; neither may write
        what the other reads or writes. May be recorded as part of a graph."""
        if self._side is None:
            one()
            other()
            return
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        one()
        with torch.cuda.stream(self._side):
            other()
        here.wait_stream(self._side)
