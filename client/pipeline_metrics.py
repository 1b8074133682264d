"""The router's snapshot of what all processes have counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.protocol.process.participant import Participant
from penstock.protocol.wire.messages.membership import MetricsAnswer, Phase

WHOLE_SECONDS = 1.0
"""So long a whole answer is waited for: twice as long as from a process's beat to its next."""
AGAIN_SECONDS = 0.1
"""Until a router that lacks reports is asked again."""
COUNTING = frozenset({"frontend", "tokenizer", "scheduler", "worker"})
"""Services whose totals the router cannot know by itself."""
_AT_WORK = (Phase.READY, Phase.DRAINING)


class PipelineMetrics:
    """Answers with the newest whole snapshot.

    A router that has just begun hears of its members beat by beat. Sums over some of them would be
    counters that fall, so what it says counts for nothing until it has the report of everybody
    whom this process knows to be at work.
    """

    def __init__(self, participant: Participant, ask: Callable[[], object]) -> None:
        """``ask`` sends the question to the router."""
        self._participant = participant
        self._ask = ask
        self._waiters: list[asyncio.Future[bool]] = []
        self._newest: MetricsAnswer | None = None

    async def newest(self) -> MetricsAnswer:
        """The snapshot of now, or the last whole one where the router has none within
        ``WHOLE_SECONDS``. Raises ``TimeoutError`` where there never was one."""
        try:
            async with asyncio.timeout(WHOLE_SECONDS):
                while not await self._asked():
                    await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError:
            if self._newest is None:
                raise
        if self._newest is None:
            raise TimeoutError
        return self._newest

    async def _asked(self) -> bool:
        """Whether the router has answered with a whole snapshot."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._ask()
        try:
            return await waiter
        finally:
            if waiter in self._waiters:  # nobody answered, or the asker has left
                self._waiters.remove(waiter)

    def arrived(self, answer: MetricsAnswer) -> None:
        is_whole = self._is_whole(answer)
        if is_whole:
            self._newest = answer
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(is_whole)

    def _is_whole(self, answer: MetricsAnswer) -> bool:
        told = {one.incarnation for one in answer.processes if one.report.samples}
        own = self._participant
        if own.status.phase in _AT_WORK and own.incarnation not in told:
            return False
        return all(
            peer.incarnation in told
            for peer in own.peers.values()
            if peer.service in COUNTING and peer.phase in _AT_WORK
        )
