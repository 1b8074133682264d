"""A second stream of the device, for work that another leaves room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class SideStream:
    """Runs two pieces of work of one stream side by side; on the CPU one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run(
        self, one: Callable[[], T], other: Callable[[], None], *, other_first: bool = False
    ) -> T:
        """Both after what is on the present stream, both ahead of what follows; neither may write
        what the other reads or writes. May be recorded as part of a graph. other_first: the device
        is given it first. Returns what ``one`` returns."""
        if self._side is None:
            result = one()
            other()
            return result
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        if other_first:
            self._beside(other)
        result = one()
        if not other_first:
            self._beside(other)
        here.wait_stream(self._side)
        return result

    def _beside(self, other: Callable[[], None]) -> None:
        with torch.cuda.stream(self._side):
            other()
