"""The set of processes of one server: starts them side by side, keeps them alive, stops them.

One loop waits for the children's ends (pidfd), the router's messages and signals; idle, it wakes
twice a second for the answers to its own beats.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.membership import Peer, Phase
from penstock.services.launcher.draining import Draining
from penstock.services.launcher.processes import (
    LONGEST_DELAY_SECONDS,
    Child,
    describe,
    exit_code,
)
from penstock.services.launcher.supervised import Models, WatchedMembers

STARTUP_TIMED_OUT = 6
"""Exit code: not ready within ``--startup-timeout-s``."""
STOP_SECONDS = 5.0
"""A process may take this much longer than its drain before it is killed."""
KILLED_SECONDS = 5.0
"""A killed process that is still there (in the kernel, on a sick device) is left behind."""
_NO_FAULT = "fenced", "begins anew"
"""In the last words of a process that the router had declared lost, or whose group lost a rank."""
UNJOINED_SECONDS = 30.0
"""A process joins within a second or two of its start; one that does not within so long is stopped
or stuck."""
ROUTER_START_SECONDS = 10.0
"""A router answers within a second or two of its start."""
ABSENT_SECONDS = 3.0
"""A member that a new router has not heard of joins it at once. The membership keeps it for 3 s;
one that is still absent after so much more is stopped or stuck."""
ECHO_SECONDS = 0.3
"""``make`` and ``timeout`` pass on a signal that this process got already: no second one."""
LOOK_SECONDS = 1.0
STOP_ORDER = ("frontend", "tokenizer", "scheduler", "worker", "keeper", "holder", "router")
_IDLE_SECONDS = 0.5  # less than the pause after which a Participant trusts its silence no more
_STARTING_SECONDS = 0.25
_JOINING_SECONDS = 0.02
_LIFELINE = "lifeline"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class StartFailed(RuntimeError):
    """A process ended, or time ran out, before the server was ever ready."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Supervisor:
    """Runs the children until a signal; ``run`` returns the exit code."""

    def __init__(
        self,
        children: Sequence[Child],
        members: WatchedMembers,
        log: Logger,
        *,
        drain_timeout_s: float,
        startup_timeout_s: float,
        on_phase: Callable[[str, str, str], None],
        is_ready: Callable[[], bool],
        on_ready: Callable[[], None],
        on_stop: Callable[[], None],
        lifeline: int | None = None,
        models: Models | None = None,
    ) -> None:
        """``lifeline``: a descriptor whose end of file counts as SIGTERM."""
        self.children = list(children)
        self._members = members
        self._log = log
        self._drain_timeout = drain_timeout_s
        self._startup_timeout = startup_timeout_s
        self._on_phase = on_phase
        self._is_ready = is_ready
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._lifeline = lifeline
        self._models = models
        self._ready = False
        self._signals: deque[int] = deque()
        self._first_signal_at: float | None = None
        self._stopping: set[str] = set()
        """Services whose processes are not started again."""
        self._selector = selectors.DefaultSelector()
        self._watched = (0, -1)
        """The membership's generation and descriptor in the selector."""

    def run(self) -> int:
        """Start everything and keep it running until SIGINT, SIGTERM or SIGHUP. SIGQUIT counts as
        two of SIGTERM, which a busy machine may deliver as one.

        Returns 0 after a clean drain, 128 + the signal when a second one cut it short. Raises
        ``StartFailed`` after everything is stopped again.
        """
        if self._lifeline is not None:
            self._selector.register(self._lifeline, selectors.EVENT_READ, _LIFELINE)
        with self._signals_taken():
            try:
                began = time.monotonic()
                for child in self.children:
                    self._start(child)
                while not self._signals:
                    self._turn()
                    if not self._ready:
                        self._starting(began)
                    elif self._models is not None:
                        self._models.tick(time.monotonic())
                return self._stop()
            finally:
                self._kill_all()
                self._selector.close()

    # --- one turn of the loop

    def _turn(self, longest: float = _IDLE_SECONDS) -> None:
        """Wait for something to happen and handle it."""
        self._watch_members()
        for key, _ in self._selector.select(self._patience(longest)):
            if isinstance(key.data, Child):
                if key.data.pidfd == key.fd:  # else it is another child's by now
                    self._ended(key.data)
            elif key.data == _LIFELINE:
                if not os.read(key.fd, 4096):
                    self._selector.unregister(key.fd)
                    self._signals.append(signal.SIGTERM)
            elif isinstance(key.data, socket.socket):
                with contextlib.suppress(BlockingIOError):
                    key.data.recv(4096)
        now = time.monotonic()
        for peer in self._members.pump(now):
            self._lost(peer)
        if self._members.router_hangs:
            self._end_router(now)
        if self._ready:
            self._end_absent(now)
        for child in self.children:
            if child.restart_at is not None and now >= child.restart_at:
                self._start_again(child, now)

    def _patience(self, longest: float) -> float:
        if not self._members.joined:
            longest = min(longest, _JOINING_SECONDS)
        elif not self._ready:
            longest = min(longest, _STARTING_SECONDS)
        due = [child.restart_at for child in self.children if child.restart_at is not None]
        return max(0.0, min(longest, *(at - time.monotonic() for at in due), longest))

    def _watch_members(self) -> None:
        """The membership's descriptor changes when it joins again."""
        generation, descriptor = self._watched
        if self._members.generation == generation:
            return
        if descriptor >= 0:
            self._selector.unregister(descriptor)
        self._watched = (self._members.generation, self._members.fd)
        self._selector.register(self._members.fd, selectors.EVENT_READ)

    def _start(self, child: Child) -> None:
        child.start(time.monotonic())
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _start_again(self, child: Child, now: float) -> None:
        """A machine that has no room for one more process may have it later."""
        try:
            self._start(child)
        except OSError as error:
            self._log.error(f"{child.label} cannot be started: {error}; trying again")
            child.restart_at = now + LONGEST_DELAY_SECONDS

    def add(self, children: Sequence[Child]) -> None:
        """Start more processes, and keep them alive from now on."""
        self.children += children
        for child in children:
            child.restart_at = time.monotonic()

    def remove(self, children: Sequence[Child]) -> None:
        """Forget processes that have ended."""
        self.children = [child for child in self.children if child not in children]

    # --- ends

    def _ended(self, child: Child) -> None:
        """A child's process is dead."""
        self._selector.unregister(child.pidfd)
        pid = child.pid
        status = child.reap(time.monotonic())
        self._members.died(pid)
        if child.service in self._stopping:
            child.restart_at = None
            if self._ready and (words := child.farewell()):
                self._log.warning(f"{child.label} {describe(status)}: {words}", ended_pid=pid)
            return
        words = child.farewell()
        # One that a busy machine kept from its beats is not at fault. (The start has its limit.)
        excused = child.lost or any(each in words for each in _NO_FAULT)
        ended = f"{child.label} {describe(status)}"
        last = f": {said}" if (said := child.last_words()) else ""
        if not self._ready and not excused:
            child.restart_at = None
            raise StartFailed(f"{ended} before the server was ready{last}", exit_code(status))
        now, models = time.monotonic(), self._models
        if models is not None and models.ended(child, ended + last, excused=excused, now=now):
            child.restart_at = None
            return
        again = "starting it again"
        if models is not None and (spare := models.spare_of(child)) is not None:
            again = "a prepared process takes its place"
            self._selector.unregister(spare.pidfd)
            child.go_on_as(spare, now)
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        cause = f": {words}" if words else ""
        self._log.error(f"{ended}; {again}{cause}", ended_pid=pid)

    def _lost(self, peer: Peer) -> None:
        """The router declared a process lost that may still live: end it, so that its memory is
        free for the one that replaces it."""
        for child in self.children:
            if child.alive and child.pid == peer.identity.pid:
                self._log.error(f"{child.label} was declared lost; killing it", lost_pid=child.pid)
                child.lost = True
                child.kill()

    def _end_router(self, now: float) -> None:
        """Nobody but the launcher can tell that the router hangs: it is the one that tells."""
        for child in self.children:
            young = now - child.started_at < ROUTER_START_SECONDS
            if child.service == "router" and child.alive and not child.killed and not young:
                self._log.error("the router hangs; killing it", lost_pid=child.pid)
                child.kill()

    def _end_absent(self, now: float) -> None:
        """End what lives and is no member: a router that never heard of it declares no loss."""
        joined, own = self._members.joined, self._members.own()
        for child in self.children:
            if not joined or not child.alive or child.held or child.service in self._stopping:
                child.absent_since = None
            elif child.pid in own:
                child.was_member, child.absent_since = True, None
            elif child.absent_since is None:
                child.absent_since = now
            else:
                limit = ABSENT_SECONDS if child.was_member else UNJOINED_SECONDS
                if now - child.absent_since > limit:
                    self._end_silent(child, limit)

    def _end_silent(self, child: Child, limit: float) -> None:
        child.absent_since = None
        again = " again" if child.was_member else ""
        self._log.error(
            f"{child.label} has not joined{again} for {limit:.0f} s; killing it",
            lost_pid=child.pid,
        )
        child.kill()

    # --- start-up

    def _starting(self, began: float) -> None:
        """Report phases; find out when everything is ready."""
        own = self._members.own()
        all_ready = True
        for child in self.children:
            peer = own.get(child.pid)
            if peer is not None:
                self._on_phase(child.label, peer.phase, peer.note)
            all_ready = all_ready and peer is not None and peer.phase == Phase.READY
        if all_ready and self._is_ready():
            self._ready = True
            self._on_ready()
        elif time.monotonic() - began > self._startup_timeout:
            missing = ", ".join(
                f"{child.label} {f'is {peer.phase} {peer.note}'.strip() if peer else 'is silent'}"
                for child in self.children
                if (peer := own.get(child.pid)) is None or peer.phase != Phase.READY
            )
            raise StartFailed(
                f"not ready within {self._startup_timeout:g} s ({missing or 'no answer on HTTP'}); "
                "allow more with --startup-timeout-s",
                STARTUP_TIMED_OUT,
            )

    # --- stopping

    def _stop(self) -> int:
        """Drain: frontends first, then what serves them, the router last. Before the server was
        ready there is nothing to drain: ``_kill_all`` follows."""
        first = self._signals.popleft()
        self._on_stop()
        draining = Draining(self._members, self._log, self._drain_timeout)
        draining.begin(first, was_ready=self._ready)
        patience = self._drain_timeout + STOP_SECONDS
        for service in STOP_ORDER if self._ready else ():
            self._stop_service(service, patience, draining.look)
            patience = STOP_SECONDS
        if self._signals:
            self._log.warning("ends at once, as told")
            return 128 + self._signals[0]
        draining.over()
        return 0

    def _stop_service(self, service: str, patience: float, look: Callable[[], None]) -> None:
        """End the processes of a service within ``patience`` seconds; the others go on.

        ``look`` is called meanwhile, at least once a second.
        """
        self._stopping.add(service)
        mine = [child for child in self.children if child.service == service]
        for child in mine:
            child.restart_at = None
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        while any(child.alive for child in mine) and not self._signals:
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(child.label for child in mine if child.alive)
                self._log.warning(f"killing {names}: not ended {patience:g} s after SIGTERM")
                break
            look()
            self._turn(min(left, LOOK_SECONDS))
        for child in mine:
            child.kill()

    def _kill_all(self) -> None:
        """Whatever still lives is killed; nothing is started any more."""
        self._stopping.update(STOP_ORDER)
        for child in self.children:
            child.restart_at = None
            child.kill()
        deadline = time.monotonic() + KILLED_SECONDS
        while any(child.alive for child in self.children) and time.monotonic() < deadline:
            for key, _ in self._selector.select(deadline - time.monotonic()):
                if isinstance(key.data, Child):
                    self._ended(key.data)

    def _on_signal(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGQUIT:
            self._signals.extend((signal.SIGTERM, signal.SIGTERM))
            return
        if self._first_signal_at is None:
            self._first_signal_at = now
        elif now - self._first_signal_at < ECHO_SECONDS:
            return
        self._signals.append(number)

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        """Collect signals in ``_signals``; each wakes the loop."""
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, woken)
        former_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        former = {}
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            former[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_fd)
            wake.close()
            woken.close()
