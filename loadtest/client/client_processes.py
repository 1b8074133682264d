"""A load from several processes, for servers that are faster than one client.

Each has its share of the sessions, and all start at one moment of the clock that the processes of a
host share. A part is told by its standard input what to do, and answers on its standard output; its
input's end ends it.

    python -m penstock.loadtest.client.client_processes   is one part, started by the first process
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import uvloop

from penstock.loadtest.client.load import Load
from penstock.loadtest.client.measured_run import (
    MeasuredRun,
    allow_files,
    load_of,
    measured,
    session_plans,
)
from penstock.loadtest.client.serve_options import ServeOptions
from penstock.loadtest.client.target import Target, TargetError
from penstock.loadtest.client.workload import Workload

START_S = 0.2
"""Between the last process that is ready and the first request."""
_SIZE = struct.Struct(">Q")
_READY = b"ready"


class Part(msgspec.Struct, kw_only=True):
    """What one process is told."""

    options: ServeOptions
    headers: dict[str, str]
    model: str
    max_model_len: int | None
    number: int
    count: int

    def of_its_own(self) -> ServeOptions:
        """With its share of what may be open at the same time."""
        limit = self.options.max_concurrency
        if limit is None:
            return self.options
        share = limit // self.count + (self.number < limit % self.count)
        return msgspec.structs.replace(self.options, max_concurrency=share)


def _packed(value: object) -> bytes:
    def plain(found: Any) -> bytes:
        return bytes(memoryview(found).cast("B"))  # an array of times

    data = msgspec.msgpack.encode(value, enc_hook=plain)
    return _SIZE.pack(len(data)) + data


def _unpacked(data: bytes) -> MeasuredRun:
    def times(kind: type, found: Any) -> Any:
        made = array("d")
        made.frombytes(found)
        return made

    return msgspec.msgpack.decode(data, type=MeasuredRun, dec_hook=times)


async def run_in_processes(
    options: ServeOptions, headers: dict[str, str], model: str, max_model_len: int | None
) -> MeasuredRun:
    """The whole load from ``options.client_processes`` processes, or from as many as may have one
    request open. Raises ``TargetError``."""
    count = min(options.client_processes, options.max_concurrency or options.client_processes)
    parts = [
        Part(
            options=options, headers=headers, model=model, max_model_len=max_model_len,
            number=number, count=count,
        )
        for number in range(count)
    ]  # fmt: skip
    children: list[asyncio.subprocess.Process] = []
    try:
        for part in parts:
            children.append(await _started(part))
        for child in children:
            if await _answer(child) != _READY:
                raise TargetError("a client process did not start; its own words are above")
        start = _packed(time.perf_counter() + START_S)
        for child in children:
            _pipe(child.stdin).write(start)
        with _ending(children):
            answers = await asyncio.gather(*map(_answer, children))
        if not all(answers):
            raise TargetError("a client process ended before its time; its words are above")
        return _together([_unpacked(data) for data in answers])
    finally:
        for child in children:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            await child.wait()


async def _started(part: Part) -> asyncio.subprocess.Process:
    """In a session of its own: Ctrl-C reaches the first process alone, which ends the others."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.loadtest.client.client_processes",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    _pipe(child.stdin).write(_packed(part))
    return child


def _pipe(found: asyncio.StreamWriter | None) -> asyncio.StreamWriter:
    if found is None:
        raise RuntimeError("a client process has no standard input")
    return found


async def _answer(child: asyncio.subprocess.Process) -> bytes:
    """What it says next; nothing where it has ended."""
    stream = child.stdout
    if stream is None:
        return b""
    try:
        size = _SIZE.unpack(await stream.readexactly(_SIZE.size))[0]
        return await stream.readexactly(size)
    except asyncio.IncompleteReadError:
        return b""


@contextlib.contextmanager
def _ending(children: list[asyncio.subprocess.Process]) -> Iterator[None]:
    """Let SIGINT or SIGTERM end the run: the parts send what they have; the second one ends all."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def interrupt() -> None:
        for child in children:
            _pipe(child.stdin).close()
        restore()

    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        restore()


def _together(runs: list[MeasuredRun]) -> MeasuredRun:
    cut = [run.interrupted for run in runs if run.interrupted is not None]
    return MeasuredRun(
        outcomes=sorted((o for run in runs for o in run.outcomes), key=lambda one: one.ended),
        duration=max(run.duration for run in runs),
        elapsed=max(run.elapsed for run in runs),
        unsent=sum(run.unsent for run in runs),
        interrupted=sum(cut) if cut else None,
        cpus=[cpu for run in runs for cpu in run.cpus],
    )


# One part.


async def _part() -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.StreamReader(limit=2**30)
    pipe = sys.stdin.buffer
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), pipe)
    part = msgspec.msgpack.decode(await _told(told), type=Part)
    options = part.of_its_own()
    target = Target(options.base_url, options.endpoint, part.headers)
    workload = Workload(options, chat=target.chat)
    workload.check_lengths(part.max_model_len)
    sessions = session_plans(options, workload)[part.number :: part.count]
    allow_files(min(options.max_concurrency or len(sessions), len(sessions)))
    load = load_of(options, target, part.model, workload, sessions)
    _say(_SIZE.pack(len(_READY)) + _READY)
    began = msgspec.msgpack.decode(await _told(told), type=float)
    cpu = time.process_time()
    interrupted = await _run_until_closed(load, began, told)
    _say(_packed(measured(load, time.process_time() - cpu, interrupted)))


async def _told(stream: asyncio.StreamReader) -> bytes:
    size = _SIZE.unpack(await stream.readexactly(_SIZE.size))[0]
    return await stream.readexactly(size)


async def _run_until_closed(load: Load, began: float, told: asyncio.StreamReader) -> int | None:
    """To the end, or to that of standard input; returns then how many requests were open."""
    task = asyncio.create_task(load.run(began))
    closed = asyncio.create_task(told.read())
    await asyncio.wait([task, closed], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        closed.cancel()
        task.result()
        return None
    interrupted = len(load.running)
    task.cancel()
    await asyncio.wait([task])
    return interrupted


def _say(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main() -> int:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_part())
    except (TargetError, ValueError) as error:
        print(f"penstock: a client process: {error}", file=sys.stderr)
        return 1
    except (asyncio.IncompleteReadError, BrokenPipeError):  # the first process is gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
