"""Which of a server's workers each host starts."""

from __future__ import annotations

from collections.abc import Sequence


class NoPlace(ValueError):
    """The hosts have too few devices. The message says how many."""


def divided(workers: int, together: int, devices: Sequence[int]) -> list[range]:
    """The workers of each host, in the order of the hosts: each has some, as evenly as their
    devices allow. together: so many, from a multiple of it on, stay on one host where that leaves
    no host without any. Raises ``NoPlace``."""
    for step in (together, 1):
        counts = _evenly(workers // step, [have // step for have in devices])
        if counts and all(counts):
            ends = [step * sum(counts[: number + 1]) for number in range(len(counts))]
            return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    raise NoPlace(
        f"{workers} workers need a device each, but the {len(devices)} hosts have "
        f"{' + '.join(map(str, devices))}: use smaller --tensor-parallel-size, "
        "--pipeline-parallel-size or --data-parallel-size, or more hosts (--nodes)"
    )


def _evenly(count: int, room: list[int]) -> list[int]:
    """Empty: there is too little room."""
    if count > sum(room):
        return []
    given = [0] * len(room)
    for _ in range(count):
        open_to = [host for host in range(len(room)) if given[host] < room[host]]
        given[min(open_to, key=lambda host: given[host])] += 1
    return given
