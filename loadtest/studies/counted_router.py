"""The router's parts in this process, their CPU counted; and what random prompts make of them."""

from __future__ import annotations

import itertools
import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.protocol.prefix_digest import DIGEST_BYTES
from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import (
    Beat,
    Capacity,
    Hello,
    Identity,
    MetricsReport,
    Phase,
    PrefixReport,
)
from penstock.protocol.wire.messages.requests import Enqueue, first_attempt
from penstock.services.router.dispatch import YOUNG_SECONDS, Dispatcher
from penstock.services.router.prefix_index import MAX_TOLD
from penstock.services.router.roster import Roster

TOKENIZER = "ipc:///tokenizer"
ATTEMPT = first_attempt(1)


def address_of(number: int) -> str:
    """The address of an engine."""
    return f"ipc:///engine/{number}"


def engine_beat(number: int, load: int, slots: int, prefixes: PrefixReport | None) -> Beat:
    """What an engine with so many open sequences says."""
    return Beat(
        address=address_of(number),
        incarnation=number,
        phase=Phase.READY,
        note="",
        progress=1,
        item_age=0.0,
        item_limit=0.0,
        load=load,
        capacity=Capacity(max_num_seqs=slots),
        metrics=msgspec.msgpack.encode(MetricsReport([])),
        membership_version=10**9,
        prefixes=prefixes,
    )


class CountedRouter:
    """The router's parts, and the seconds of CPU that they take."""

    def __init__(self, deliver: Callable[[str, Enqueue], None]) -> None:
        self.seconds = {Enqueue: 0.0, Beat: 0.0}
        """CPU seconds by what they were for; beats include what is done each tick."""
        self.requests = 0
        self._deliver = deliver
        self._encode = codec.Encoder(1)
        self._peer = codec.Encoder(2)
        self.roster = Roster(1, self._send, self._send_last, lambda _: None, lambda *_: None)
        self.dispatcher = Dispatcher(self.roster, self._send, -2 * YOUNG_SECONDS)

    def hello(self, number: int, now: float = 0.0) -> None:
        """An engine joins."""
        identity = msgspec.msgpack.encode(Identity(number, "simulated"))
        hello = Hello(
            *("scheduler", address_of(number), number),
            *(codec.PROTOCOL_VERSION, codec.SCHEMA_HASH, identity),
        )
        self.roster.hello(hello, now)

    def lost(self, number: int) -> None:
        """An engine is declared lost."""
        self.roster.bury(self.roster.members[number], "its process ended")

    def request(self, message: Enqueue, now: float) -> None:
        """From the frame that comes in to the frame that goes out."""
        frame = self._peer(message)
        began = time.thread_time()
        _, decoded = codec.decode(frame)
        if isinstance(decoded, Enqueue):
            self.requests += 1
            self.dispatcher.request(decoded, now)
        self.seconds[Enqueue] += time.thread_time() - began

    def beat(self, message: Beat, now: float) -> int:
        """One beat of an engine, and the router's tick; returns the beat's bytes."""
        frame = self._peer(message)
        began = time.thread_time()
        _, decoded = codec.decode(frame)
        if isinstance(decoded, Beat):
            self.roster.beat(decoded, now)
        self.dispatcher.tick(now)
        self.seconds[Beat] += time.thread_time() - began
        return len(frame)

    def _send(self, address: str, message: Message) -> bool:
        self._encode(message)
        if isinstance(message, Enqueue):
            self._deliver(address, message)
        return True

    def _send_last(self, address: str, message: Message) -> None:
        self._send(address, message)


@dataclass(slots=True)
class Strangers:
    """What random prompts make of the router."""

    requests: int
    digests_each: int
    us: tuple[float, float]
    """CPU for a request, of the first and the last tenth."""
    digests: tuple[int, int]
    """Known digests, after the first tenth and in the end."""
    mib: float
    """What the router's memory has grown by, the requests' own routes included."""


def strangers(engines: int, requests: int, digests: int) -> Strangers:
    """Send prompts with so many digests, none of which was ever seen before, to engines that tell
    of as many prefixes as they may."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    router = _random_prompts(engines, requests, digests, [], [])
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del router
    seconds, known = [0.0], list[int]()
    _random_prompts(engines, requests, digests, seconds, known)
    us = [10 * 1e6 * (after - first) / requests for first, after in itertools.pairwise(seconds)]
    return Strangers(requests, digests, (us[0], us[-1]), (known[0], known[-1]), grown / 2**20)


def _random_prompts(
    engines: int, requests: int, digests: int, seconds: list[float], known: list[int]
) -> CountedRouter:
    """Notes CPU and known digests after each tenth of the requests, a thousand of which come in a
    second."""
    router = CountedRouter(lambda *_: None)
    full = [os.urandom(DIGEST_BYTES * MAX_TOLD) for _ in range(engines)]
    for number, held in enumerate(full, start=1):
        router.hello(number)
        router.beat(engine_beat(number, 0, 256, PrefixReport(0, 1, held)), 0.0)
    for number in range(1, requests + 1):
        now = number / 1000
        prefix = os.urandom(DIGEST_BYTES * digests)
        router.request(Enqueue(number, ATTEMPT, TOKENIZER, b"", "", prefix), now)
        if number % 250 == 0:
            router.dispatcher.tick(now)
        if number % (requests // 10) == 0:
            seconds.append(router.seconds[Enqueue])
            known.append(len(router.roster.prefixes))
    return router
