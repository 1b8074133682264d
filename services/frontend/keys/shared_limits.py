"""The limits of keys as a Valkey or Redis server counts them for all frontends.

A request asks once, when it comes, those that come together in one call; what it has used is told
behind its back. No request waits longer than ``WAIT_SECONDS`` or fails because of the server: where
that does not answer, its caller counts by itself, and tells the server afterwards. The server knows
each request by its name and counts it once, so an answer that is late or lost changes nothing:
whoever is in doubt tells again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable
from typing import Any

import msgspec

from penstock.protocol.keys.record import KeyLimits
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.limit_scripts import ADMIT, RENEW, SETTLE
from penstock.services.frontend.keys.standing import (
    REFUSALS,
    Level,
    Refusal,
    Standing,
    amounts,
)
from penstock.services.frontend.valkey_address import ValkeyAddress
from penstock.services.frontend.valkey_client import answered_errors, connect

WAIT_SECONDS = 0.05
OPERATION_SECONDS = 2.0
"""For what nobody waits for."""
TELL_SECONDS = 0.05
"""What has ended is told so often."""
RENEW_SECONDS = 5.0
RETRY_SECONDS = 1.0
SLOW_ANSWERS = 3
"""So many answers in a row that did not come in time, and the server counts as gone."""
MAX_CONNECTIONS = 4
MAX_UNTOLD = 100_000
"""Ended requests that wait to be told; older ones are forgotten."""
MAX_TOLD = 128
"""In one call."""
MAX_REFUSED = 30
"""So many times in a row a call may be answered with an error before what it tells is given up."""

_log = logging.getLogger("penstock.frontend")


class Verdict(msgspec.Struct, frozen=True):
    """What the server says about a request."""

    refusal: Refusal | None
    standing: Standing


class Ended(msgspec.Struct, frozen=True):
    """What the server is told of a request, whether it was let in by the server or without it."""

    key: KnownKey
    limits: KeyLimits
    name: str
    tokens: int
    took_place: bool
    """Else it costs nothing at all."""


class NotCounted(Exception):
    """The server cannot count this one key; the message says why."""


class _Question(msgspec.Struct, frozen=True, eq=False):
    """A request that wants to come in."""

    key: KnownKey
    limits: KeyLimits
    tokens: int
    name: str
    answer: asyncio.Future[Verdict]


class SharedLimits:
    """One server."""

    def __init__(self, address: ValkeyAddress, *, wait_s: float = WAIT_SECONDS) -> None:
        """Connects when it is first needed. Raises ``ConfigError`` where the library is
        missing."""
        self._address = address
        self.wait_s = wait_s
        """How long a request waits for the server, in seconds."""
        self._client = connect(
            address, OPERATION_SECONDS, MAX_CONNECTIONS, f"--limits-url {address}", "limits"
        )
        self._answered = answered_errors()
        self._admit = self._client.register_script(ADMIT)
        self._settle = self._client.register_script(SETTLE)
        self._renew = self._client.register_script(RENEW)
        self.answers = True
        """Whether the server did so when it was asked last."""
        self.retry_s = RETRY_SECONDS
        """How often a server is tried that is gone, in seconds."""
        self._slow = 0
        self._refused = 0
        self._uncounted: set[str] = set()
        """Keys of which the log says that the server cannot count them."""
        self._questions: list[_Question] = []
        self._asking: asyncio.Task[None] | None = None
        self._untold: deque[Ended] = deque(maxlen=MAX_UNTOLD)
        self._open: dict[str, list[str]] = {}
        """Set and string of open requests by their names, for keys that may have only so many."""
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False
        self._renewed_at = 0.0

    def begin(self) -> None:
        """The process begins to serve."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def end(self) -> None:
        """The process ends: tell what there is to tell. Takes a few seconds at most, whatever the
        server and its client do."""
        self._has_ended = True
        tasks = [task for task in (self._task, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=OPERATION_SECONDS)
        if self.answers:
            await _in_time(self._tell_all())
        await _in_time(self._client.aclose())

    async def admit(
        self, key: KnownKey, limits: KeyLimits, tokens: int, name: str
    ) -> Verdict | None:
        """Ask whether a request may come in, and count it if it may. ``None``: the server did
        not say."""
        if not self.answers:
            return None
        loop = asyncio.get_running_loop()
        question = _Question(key, limits, tokens, name, loop.create_future())
        self._questions.append(question)
        if self._asking is None or self._asking.done():
            self._asking = loop.create_task(self._ask())
        try:
            async with asyncio.timeout(self.wait_s):
                verdict = await question.answer
        except asyncio.CancelledError:  # its client has left
            self.withdraw(key, limits, name)
            raise
        except NotCounted as error:
            self._cannot_count(key, str(error))
            return None
        except Exception as error:
            self._failed(error)
            return None
        self._slow = 0
        if verdict.refusal is None and limits.concurrent is not None:
            self._open[name] = _places(key, name)[1:]
        return verdict

    async def _ask(self) -> None:
        """Ask for all that wait, in one call as long as there are any."""
        while self._questions:
            asked = [one for one in self._questions[:MAX_TOLD] if not one.answer.done()]
            del self._questions[:MAX_TOLD]
            places: list[str] = []
            values: list[Any] = []
            for one in asked:
                places += _places(one.key, one.name)
                values += [one.tokens, one.name]
                values += [amount or 0 for amount in amounts(one.limits).values()]
            try:
                async with asyncio.timeout(OPERATION_SECONDS):
                    answers = await self._admit(places, values) if asked else []
                verdicts = [
                    _verdict(answer, one.limits) for one, answer in zip(asked, answers, strict=True)
                ]
                self._uncounted -= {
                    one.key.tenant
                    for one, verdict in zip(asked, verdicts, strict=True)
                    if isinstance(verdict, Verdict)
                }
            except Exception as error:
                for one in asked:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one, verdict in zip(asked, verdicts, strict=True):
                if one.answer.done():  # it came too late, or the client has left
                    continue
                if isinstance(verdict, Verdict):
                    one.answer.set_result(verdict)
                else:
                    one.answer.set_exception(verdict)

    def withdraw(self, key: KnownKey, limits: KeyLimits, name: str) -> None:
        """A request that was asked for is not let in, and the server may have let it in."""
        self.tell(Ended(key, limits, name, 0, took_place=False))

    def tell(self, ended: Ended) -> None:
        """A request has ended."""
        self._open.pop(ended.name, None)
        self._untold.append(ended)

    def opened(self, key: KnownKey, name: str) -> None:
        """A request was let in without the server: it hears of it with the next renewal."""
        self._open[name] = _places(key, name)[1:]

    # --- behind the requests' back

    async def _run(self) -> None:
        is_known = False
        """The server has the scripts: no request waits until it has."""
        while not self._has_ended:
            try:
                if not (is_known and self.answers):
                    async with asyncio.timeout(OPERATION_SECONDS):
                        for script in (ADMIT, SETTLE, RENEW):
                            await self._client.script_load(script)
                    is_known = True
                await self._renew_open()
                await self._tell_all()
            except Exception as error:
                self._gone(error)
            else:
                if not self.answers:
                    self._is_back()
            await asyncio.sleep(TELL_SECONDS if self.answers else self.retry_s)

    async def _tell_all(self) -> None:
        while self._untold:
            count = min(MAX_TOLD, len(self._untold))
            told = [self._untold.popleft() for _ in range(count)]
            places: list[str] = []
            values: list[Any] = []
            for one in told:
                places += _places(one.key, one.name)
                values += [one.name, int(one.took_place), one.tokens]
                values += [amount or 0 for amount in list(amounts(one.limits).values())[:3]]
            try:
                async with asyncio.timeout(OPERATION_SECONDS):
                    answers = await self._settle(places, values)
                found = msgspec.convert(answers, list[int | bytes])
            except BaseException as error:
                if not self._is_given_up(error, count):
                    self._untold.extendleft(reversed(told))
                raise
            self._refused = 0
            for one, answer in zip(told, found, strict=False):
                if isinstance(answer, bytes):
                    self._cannot_count(one.key, answer.decode(errors="replace"))

    def _is_given_up(self, error: BaseException, count: int) -> bool:
        """Whether what could not be told is not told again: the server is there, and has answered
        with an error for long."""
        if not isinstance(error, self._answered):
            return False
        self._refused += 1
        if self._refused < MAX_REFUSED:
            return False
        self._refused = 0
        _log.warning(
            "the limits at %s were not told of %d requests that have ended (%s)",
            self._address,
            count,
            _said(error),
        )
        return True

    async def _renew_open(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at < RENEW_SECONDS:
            return
        self._renewed_at = now
        names = list(self._open)
        for first in range(0, len(names), MAX_TOLD):
            part = [name for name in names[first : first + MAX_TOLD] if name in self._open]
            if part:
                places = [place for name in part for place in self._open[name]]
                async with asyncio.timeout(OPERATION_SECONDS):
                    await self._renew(places, part)

    # --- whether it answers

    def _failed(self, error: Exception) -> None:
        """A request got no answer. One that came late may be a moment's matter."""
        self._slow += 1
        if not isinstance(error, TimeoutError) or self._slow >= SLOW_ANSWERS:
            self._gone(error)

    def _cannot_count(self, key: KnownKey, why: str) -> None:
        if key.tenant not in self._uncounted:
            self._uncounted.add(key.tenant)
            _log.warning(
                "the limits at %s cannot count the key %s (%s); each frontend counts its part of "
                "it by itself",
                self._address,
                key.name,
                why,
            )

    def _gone(self, error: Exception) -> None:
        if self.answers:
            _log.warning(
                "the limits at %s cannot be used (%s); each frontend counts its part by itself "
                "until they can",
                self._address,
                _said(error),
            )
        self.answers = False

    def _is_back(self) -> None:
        _log.warning("the limits at %s can be used again", self._address)
        self.answers, self._slow, self._renewed_at = True, 0, 0.0


async def _in_time(doing: Awaitable[object]) -> None:
    """Wait for it, but for no longer than an operation may take."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(OPERATION_SECONDS):
            await doing


def new_name() -> str:
    """Of a request, for the server."""
    return secrets.token_hex(8)


def _said(error: BaseException) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))


def _places(key: KnownKey, name: str) -> list[str]:
    """Hash and set of a key, and the string of a request."""
    own = f"penstock:limits:{{{key.tenant}}}"
    return [own, f"{own}:open", f"{own}:request:{name}"]


def _verdict(answer: Any, limits: KeyLimits) -> Verdict | NotCounted:
    """Raises ``MsgspecError`` where it is no answer of the script."""
    if isinstance(answer, bytes):
        return NotCounted(answer.decode(errors="replace"))
    numbers = msgspec.convert(answer, tuple[int, int, int, int, int, int, int])
    refused, used, wait, requests, requests_reset, tokens, tokens_reset = numbers
    if not 0 <= refused <= len(REFUSALS):
        raise msgspec.ValidationError(f"an unknown limit, {refused}")
    refusal = None
    if refused:
        limit = REFUSALS[refused - 1]
        refusal = Refusal(limit, amounts(limits)[limit] or 0, used, wait / 1000)
    return Verdict(
        refusal,
        Standing(
            _level(limits.requests_per_minute, requests, requests_reset),
            _level(limits.tokens_per_minute, tokens, tokens_reset),
        ),
    )


def _level(limit: int | None, used: int, reset_ms: int) -> Level | None:
    return None if limit is None else Level(limit, max(0, limit - used), reset_ms / 1000)
