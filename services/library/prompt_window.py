"""The requests of one call of ``LLM``, of which so many prompts are in the pipeline at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from penstock.protocol.wire.messages.requests import Work, prompts_of
from penstock.services.library.client import PipelineClient
from penstock.services.library.member import RETRY_SECONDS, Submission
from penstock.services.library.progress import ProgressBar
from penstock.services.library.results import check, wants_retry

_PUMP_SECONDS = 0.05
REFUSED_BURST = 64
"""So many are sent at once when some were refused for want of room."""


class PromptWindow:
    """Requests by the number of their first prompt in the call.

    ``first``: the number of the call's first prompt among all of the client's.
    """

    def __init__(self, client: PipelineClient, bar: ProgressBar, first: int, max_open: int) -> None:
        self._client, self._bar = client, bar
        self._first, self._max_open = first, max_open
        self._called = time.monotonic()
        self._works: dict[int, Work] = {}
        self._waiting = deque[int]()
        self._running: dict[int, Submission] = {}
        self._done: dict[int, Submission] = {}
        self._is_open = 0
        """Prompts in the pipeline."""
        self._burst = max_open
        self._pause_until = 0.0

    def prepare(self, works: Iterable[Work]) -> None:
        """Take all requests. The first are on their way while the others are still prepared, and
        all are prepared before any is awaited: a wrong prompt is found at once."""
        number = 0
        pump_at = time.monotonic() + _PUMP_SECONDS
        for work in works:
            self._works[number] = work
            prompts = len(prompts_of(work))
            if number + prompts <= self._max_open:
                self._submit(number)
            else:
                self._waiting.append(number)
            number += prompts
            if time.monotonic() >= pump_at:  # many prompts take seconds: what is open goes on
                self._client.pump(0.0)
                pump_at = time.monotonic() + _PUMP_SECONDS

    def _submit(self, number: int) -> None:
        name = f"{self._first + number}"
        one = self._client.submit(self._works[number], name, called=self._called)
        self._running[number] = one
        self._is_open += one.prompts

    @property
    def goes_on(self) -> bool:
        """Whether some request has not ended."""
        return bool(self._waiting or self._running)

    def send(self) -> None:
        """Send what waits and has room."""
        sent = 0
        while (
            self._waiting
            and self._is_open + len(prompts_of(self._works[self._waiting[0]])) <= self._max_open
            and sent < self._burst
            and time.monotonic() >= self._pause_until
        ):
            sent += 1
            self._submit(self._waiting.popleft())

    def take(self) -> None:
        """Take what has ended; who was refused for want of room waits again. Raises what ``check``
        raises for a request that failed."""
        for number, one in [found for found in self._running.items() if found[1].done]:
            self._is_open -= one.prompts
            if wants_retry(one.progress):
                self._waiting.appendleft(number)
                self._pause_until = time.monotonic() + RETRY_SECONDS
                self._burst = REFUSED_BURST
            else:
                check(f"prompt {number + one.at_fault}", one.progress)
                self._done[number] = one
                usage = one.progress.usage
                self._bar.finished(one.prompts, usage.prompt, usage.completion)
            del self._running[number]
        self._bar.refresh()

    def cancel(self) -> None:
        """End whatever still runs."""
        for one in self._running.values():
            self._client.ledger.cancel(one.id)

    def ended(self) -> list[Submission]:
        """All requests, in the order in which they were given, once none goes on."""
        return [self._done[number] for number in self._works]
