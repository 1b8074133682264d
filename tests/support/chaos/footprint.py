"""What the processes of a server hold of the machine: memory of their own, open files."""

from __future__ import annotations

from dataclasses import dataclass

from support.pipeline.served import Served
from support.polling import until

MIB = 1024 * 1024


@dataclass(frozen=True)
class Footprint:
    """What one process takes of the machine."""

    role: str
    private_bytes: int
    """RssAnon and VmSwap: memory that is this process's own."""
    files: int


def footprints(server: Served) -> dict[int, Footprint]:
    """The footprint of every process of the server, by its id."""
    return {
        pid: Footprint(server.role_of(process), private_bytes(pid), process.num_fds())
        for pid, process in server.processes().items()
    }


def private_bytes(pid: int) -> int:
    found = 0
    with open(f"/proc/{pid}/status") as lines:
        for line in lines:
            if line.startswith(("RssAnon:", "VmSwap:")):
                found += int(line.split()[1]) * 1024
    return found


def growth(before: dict[int, Footprint], after: dict[int, Footprint]) -> dict[str, float]:
    """MiB by role and process id. The processes must be the same."""
    assert before.keys() == after.keys(), "a process died or was replaced"
    return {
        f"{one.role} {pid}": round((after[pid].private_bytes - one.private_bytes) / MIB, 2)
        for pid, one in before.items()
    }


def files_are_closed(server: Served, before: dict[int, Footprint], seconds: float = 20.0) -> None:
    """No process has more open files than before, once connections have been closed."""

    def more() -> dict[str, int]:
        now = footprints(server)
        return {
            f"{one.role} {pid}": now[pid].files - one.files
            for pid, one in before.items()
            if now[pid].files > one.files
        }

    until(lambda: not more(), seconds, told=more)
