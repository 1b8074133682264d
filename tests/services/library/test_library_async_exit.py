"""An asyncio program that was through much leaves nothing on its machine, nor in its process."""

from __future__ import annotations

import os
import threading

import psutil
import pytest
from support.chaos.left_behind import named_memory, orphans, own_place
from support.library.async_clients import Program, aborted_and_killed, server_of
from support.pipeline.served import leftovers


def kernel_threads() -> set[str]:
    """All threads of this process, also those that Python has not started."""
    return set(os.listdir("/proc/self/task"))


def sockets() -> set[str]:
    """Open sockets of this process, by their inodes."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # the folder's own
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_generators_with_aborts_and_two_killed_workers_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with own_place() as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
        threads, native, opened = set(threading.enumerate()), kernel_threads(), sockets()
        program = Program(part_seconds=600.0)
        launcher = psutil.Process(server_of(program.llm).pid)
        aborted_and_killed(program, 1000, [0.2, 0.6], range(1000))
        processes = [launcher, *launcher.children(recursive=True)]
        assert len(processes) >= 5 and leftovers(place)
        assert named_memory(process.pid for process in processes) == []
        program.close()
        _, alive = psutil.wait_procs(processes, 30)
        assert not alive
        assert orphans(place) == [], "killed workers and those that replaced them"
        assert leftovers(place) == []
    assert not set(threading.enumerate()) - threads
    assert not kernel_threads() - native
    assert not sockets() - opened
