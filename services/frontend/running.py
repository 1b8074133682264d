"""Requests that run in this process and have a name of their client's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock.services.frontend.dialects.interface import Renderer
from penstock.services.frontend.generation import Generation


class Running(NamedTuple):
    generation: Generation
    renderer: Renderer


class RunningRequests:
    """By who sent them and the name that they were given: nobody finds those of another."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[Running]] = {}

    @contextmanager
    def entered(self, owner: str, name: str | None, running: Running) -> Iterator[None]:
        """Hold a request for the time of the block. ``None``: it has no name."""
        if name is None:
            yield
            return
        key = owner, name
        self._found.setdefault(key, []).append(running)
        try:
            yield
        finally:
            self._found[key].remove(running)
            if not self._found[key]:
                del self._found[key]

    def of(self, owner: str, name: str) -> list[Running]:
        """The oldest first."""
        return list(self._found.get((owner, name), ()))
