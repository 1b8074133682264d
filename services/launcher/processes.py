"""One child process of the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from penstock.protocol.config.resolve import ENVIRONMENT_PREFIX
from penstock.protocol.process.held_start import WANTED
from penstock.services.launcher.environment import without_long_values
from penstock.services.launcher.stderr_relay import StderrRelay

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 10.0
STABLE_SECONDS = 60.0
"""A child that lived so long starts again with the shortest delay."""


class Child:
    """A service's process: started, watched by its pidfd, started again after its end.

    It has a process group of its own, so that Ctrl-C reaches only the launcher, which decides.
    """

    def __init__(
        self,
        service: str,
        number: int,
        environment: Mapping[str, str],
        listen_fd: int | None = None,
        *,
        only_one: bool = False,
        model: str = "",
        render: Callable[[bytes, str], bytes] | None = None,
    ) -> None:
        """``model``: whose process it is, where there are several; ``render``: see
        ``StderrRelay``."""
        self.service, self.number = service, number
        self.label = service if only_one else f"{service} {number}"
        if model:
            self.label += f" {model}"
        self.pidfd = -1
        self.restart_at: float | None = None
        """When to start it again; ``None`` while it lives or is not to be started."""
        self.absent_since: float | None = None
        """When it began to live without being a member; ``None`` while it is one."""
        self.was_member = False
        """Whether it has joined since its start."""
        self.killed = False
        """Whether it has been sent SIGKILL since its start."""
        self.lost = False
        """Whether the router has declared it lost since its start."""
        self.held = False
        """It is started ahead, prepares itself, and is no member before ``release``."""
        self.on_device = False
        """As a held one it prepares itself on its device, too."""
        self.started_at = 0.0
        self._hold = -1
        """The end of the pipe by which a held process hears that it is wanted."""
        self._environment = dict(environment)
        self._render = render
        self._listen_fds = () if listen_fd is None else (listen_fd,)
        self._arguments = _command(service, number, listen_fd)
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: StderrRelay | None = None
        self._delay = FIRST_DELAY_SECONDS

    def spare(self) -> Child:
        """A child of the same kind, to be prepared for the end of this one's process."""
        found = Child(self.service, self.number, self._environment, render=self._render)
        found.label, found.held = f"{self.label}, prepared", True
        found.on_device = True
        return found

    def go_on_as(self, spare: Child, now: float) -> None:
        """Its process has ended: from now on it has the one that ``spare`` has prepared, and
        ``spare`` has none."""
        self._process, self.pidfd, self._stderr = spare._process, spare.pidfd, spare._stderr
        self._hold, self.started_at, self.restart_at = spare._hold, now, None
        self.was_member = self.killed = self.lost = False
        spare._process, spare.pidfd, spare._hold, spare._stderr = None, -1, -1, None
        self.release()

    @property
    def pid(self) -> int:
        """0 while it does not live."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def environment(self) -> dict[str, str]:
        return dict(self._environment)

    def start(self, now: float) -> None:
        """Start the process. Call it from the main thread: the child ends with that thread."""
        self.started_at = now
        self.restart_at = None
        self.was_member = self.killed = self.lost = False
        read, write = os.pipe()
        waits, self._hold = os.pipe() if self.held else (-1, -1)
        held = ["--hold-fd", str(waits)] if self.held else []
        held += ["--on-device", "1"] if self.held and self.on_device else []
        try:
            with _as_long_as_it_is(self._environment) as (environment, files):
                self._process = subprocess.Popen(
                    [*self._arguments, *held, "--parent-pid", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=write,
                    stderr=write,
                    env=environment,
                    pass_fds=(*self._listen_fds, *files, *([waits] if self.held else [])),
                    process_group=0,
                )
        except BaseException:
            os.close(read)
            self._close_hold()
            raise
        finally:
            os.close(write)
            if self.held:
                os.close(waits)
        self.pidfd = os.pidfd_open(self._process.pid)
        self._stderr = StderrRelay(self.label, read, self._render)
        self._stderr.start()

    def release(self) -> None:
        """Let a held process go on."""
        self.held, self.absent_since = False, None
        if self._hold >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._hold, WANTED)
            self._close_hold()

    def _close_hold(self) -> None:
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def change_environment(self, name: str, value: str) -> None:
        """From its next start on."""
        self._environment[name] = value

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it lives."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.killed = True
        self.signal(signal.SIGKILL)

    def reap(self, now: float) -> int:
        """Collect the ended process and what it left running. Returns its exit status, negative
        for a signal, and sets the delay before its next start."""
        if self._process is None:
            raise RuntimeError(f"{self.label} does not run")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the dead leader still holds the number
        status = self._process.wait()
        self.on_device = False  # whatever has ended it there would do so again
        os.close(self.pidfd)
        self._close_hold()
        self._process, self.pidfd = None, -1
        if now - self.started_at >= STABLE_SECONDS:
            self._delay = FIRST_DELAY_SECONDS
        self.restart_at = now + self._delay
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)
        return status

    def farewell(self) -> str:
        """Why the ended process could not go on, if it said so; not printed yet."""
        return self._stderr.farewell() if self._stderr is not None else ""

    def last_words(self) -> str:
        """The farewell, or else the last line that the process wrote."""
        return self._stderr.last_words() if self._stderr is not None else ""


@contextlib.contextmanager
def _as_long_as_it_is(environment: Mapping[str, str]) -> Iterator[tuple[dict[str, str], list[int]]]:
    """The same for a new process, however long its values are: what Linux does not take stands in
    a file in memory, whose descriptor the process inherits."""
    short, text = without_long_values(environment)
    if not text:
        yield short, []
        return
    file = os.memfd_create("penstock-config")
    try:
        with open(os.dup(file), "wb") as writer:
            writer.write(os.fsencode(text))
        yield short | {ENVIRONMENT_PREFIX + "CONFIG": f"/proc/self/fd/{file}"}, [file]
    finally:
        os.close(file)


def _command(service: str, number: int, listen_fd: int | None) -> list[str]:
    # "-m" puts the current folder on the module path, where any file could stand for one of ours;
    # "-P" keeps it off, unless this process itself was found through it (a bare checkout).
    bare = "" in sys.path or os.getcwd() in sys.path
    command = [sys.executable, *([] if bare else ["-P"]), "-m", "penstock.services", service]
    command += ["--number", str(number)]
    if listen_fd is not None:
        command += ["--listen-fd", str(listen_fd)]
    return command


def describe(status: int) -> str:
    """``ended with exit code 3`` or ``was killed by SIGKILL``."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def exit_code(status: int) -> int:
    """The launcher's own exit code after a child's end: never 0, a signal as shells show it."""
    return 128 - status if status < 0 else status or 1
