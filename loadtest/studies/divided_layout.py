"""How a model is divided among cards in a study, and which cards a server gets."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

MOST_RANKS = 64


class Layout(NamedTuple):
    tensor: int
    pipeline: int
    data: int

    @property
    def ranks(self) -> int:
        """Of each engine."""
        return self.tensor * self.pipeline

    @property
    def cards(self) -> int:
        return self.ranks * self.data

    @property
    def flags(self) -> list[str]:
        return [f"--{name}-parallel-size={size}" for name, size in self._asdict().items()]

    def __str__(self) -> str:
        sizes = zip(("TP", "PP", "DP"), self, strict=True)
        return " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one"


ONE = Layout(1, 1, 1)


def layout(text: str) -> Layout:
    """A type for argparse: tensor, pipeline and data parallel size, as ``2x2x1``."""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"expected tensor x pipeline x data parallel size as 2x2x1, got {text!r}"
        )
    found = Layout(*map(int, sizes))
    if found.cards > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text} needs {found.cards} cards of {MOST_RANKS}")
    return found


class Cards:
    """GPUs by number (on CPUs, places for ranks). Several servers may have one, and take turns at
    being measured."""

    def __init__(self, count: int, share: int) -> None:
        """share: servers that a card may have at a time."""
        self._servers, self._share = [0] * count, share
        self._turns = [threading.Lock() for _ in range(count)]
        self._changed = threading.Condition()

    def take(self, number: int) -> list[int]:
        """Wait for so many cards, and take those with the fewest servers."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._open()) >= number)
            found = sorted(self._open()[:number])
            for card in found:
                self._servers[card] += 1
            return found

    def give_back(self, cards: Sequence[int]) -> None:
        with self._changed:
            for card in cards:
                self._servers[card] -= 1
            self._changed.notify_all()

    @contextmanager
    def alone(self, cards: Sequence[int]) -> Iterator[None]:
        """Wait until no other server is measured on any of them."""
        with ExitStack() as held:
            for card in sorted(cards):
                held.enter_context(self._turns[card])
            yield

    def _open(self) -> list[int]:
        found = (card for card, count in enumerate(self._servers) if count < self._share)
        return sorted(found, key=lambda card: self._servers[card])
