"""Finds out whether the ranks of a stage can sum over peer memory, and connects them for it.

All of them do or none does, since each waits for the others: so each says what it has found before
the next thing is tried. Where one of them cannot, NCCL sums, and the log says why.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.kernels.gpu.all_reduce import (
    DTYPES,
    GAVE_UP,
    STOP,
    PeerRows,
    all_reduce,
    empty_word,
    memory_bytes,
    most_rows,
)
from penstock.services.worker.gpu.peer_memory import PeerMemory
from penstock.services.worker.models.rank_shares import RankPlace, most_peer_bytes
from penstock.services.worker.rank_group import LIMIT_SECONDS, Meeting

MOST_RANKS = 8
LIMIT_LOOKS = 1 << 30
"""Some eight minutes: longer than a step that compiles kernels, and than ranks lie apart. The host
notices a lost rank long before."""
_TRIAL_LOOKS = 1 << 26
_TRIALS = 4
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class NoPeerMemory(Exception):
    """A rank cannot sum over peer memory. Says why."""


class _Said(msgspec.Struct, frozen=True):
    """What a rank tells the others of its stage."""

    why_not: str = ""
    host: str = ""
    rows: int = 0
    handle: bytes = b""


class OneShotSums:
    """Sums of few rows, of one width and type, over the ranks of a stage."""

    def __init__(self, shared: PeerRows, memory: PeerMemory) -> None:
        self.shared = shared
        self._memory = memory
        self._words = shared.words.numpy()

    def sum(self, x: Tensor) -> None:
        """Put the sum over the ranks into ``x``, rows that ``shared`` holds."""
        all_reduce(x, x, self.shared)

    @property
    def gave_up(self) -> bool:
        """Whether a sum means nothing because another rank's part has not come."""
        return bool(self._words[GAVE_UP])

    def stop(self) -> None:
        """End the sums that wait, and all later ones, with results that mean nothing. From any
        thread."""
        self._words[STOP] = 1


def _own_memory(place: RankPlace, like: Tensor, rows: int) -> PeerMemory:
    """Memory for the rows of all ranks. Raises ``NoPeerMemory`` where there can be none."""
    width, dtype = like.shape[1], like.dtype
    if place.shares > MOST_RANKS:
        raise NoPeerMemory(f"{place.shares} ranks share a layer, and it is for {MOST_RANKS}")
    if not rows:
        raise NoPeerMemory(f"it does not take rows of {width} {dtype}")
    if like.is_cuda:
        torch.cuda.synchronize(like.device)  # so that this thread has a context
    return PeerMemory(memory_bytes(place.shares, rows, width, dtype), empty_word(dtype))


def connect_one_shot(
    meeting: Meeting, place: RankPlace, like: Tensor, most_bytes: int = 0
) -> OneShotSums | str:
    """What sums rows like those of ``like`` [N, D] over the ranks of this one's stage, or why
    nothing does. most_bytes: of a sum; 0: by the number of ranks.

    To be called by all of them. Raises ``RuntimeError`` where one of them does not answer.
    """
    talk = _Talk(meeting, place)
    most_bytes = most_bytes or most_peer_bytes(place.shares)
    width, dtype = like.shape[1], like.dtype
    rows = most_rows(most_bytes, width, dtype) if dtype in DTYPES else 0
    made: list[PeerMemory] = []

    def offer() -> _Said:
        made.append(memory := _own_memory(place, like, rows))
        host = _BOOT.read_text().strip()
        return _Said(host=host, rows=rows, handle=memory.handle())

    def connect() -> _Said:
        if len({said.host for said in offers}) > 1:
            raise NoPeerMemory("the ranks are on several hosts")
        if len({said.rows for said in offers}) > 1:
            raise NoPeerMemory("the ranks have GPUs of several kinds")
        for rank, said in enumerate(offers):
            own = rank == place.share
            peers.append(made[0].address if own else made[0].open(said.handle))
        return _Said()

    def attempt() -> _Said:
        _try(shared._replace(limit=_TRIAL_LOOKS), like.device)
        return _Said()

    peers: list[int] = []
    try:
        offers = talk.all_say("offer", offer)
        talk.all_say("connect", connect)
        shared = PeerRows(
            place.share, tuple(peers), torch.zeros(rows, dtype=torch.int32, device=like.device),
            torch.zeros(2, dtype=torch.int32, pin_memory=like.is_cuda), rows, width, dtype,
            LIMIT_LOOKS,
        )  # fmt: skip
        talk.all_say("try", attempt)
    except NoPeerMemory as reason:
        return str(reason)
    return OneShotSums(shared, made[0])


class _Talk:
    """What the ranks of a stage say to each other at a meeting."""

    def __init__(self, meeting: Meeting, place: RankPlace) -> None:
        self._place = place
        self._store: Any = meeting.store(datetime.timedelta(seconds=LIMIT_SECONDS))
        self._name = f"{meeting.name}/sums {place.stage}"

    def all_say(self, about: str, find: Callable[[], _Said]) -> list[_Said]:
        """What each rank has found, in their order. Raises ``NoPeerMemory`` on all of them where
        one of them has found that it cannot."""
        own = self._place.share
        try:
            said = find()
        except Exception as failure:
            said = _Said(why_not=str(failure) or type(failure).__name__)
        self._store.set(f"{self._name}/{about}/{own}", msgspec.json.encode(said).decode())
        found = [
            said if share == own else self._heard(f"{self._name}/{about}/{share}")
            for share in range(self._place.shares)
        ]
        for share, each in enumerate(found):
            if each.why_not:
                raise NoPeerMemory(f"rank {share} of {len(found)}: {each.why_not}")
        return found

    def _heard(self, key: str) -> _Said:
        return msgspec.json.decode(self._store.get(key), type=_Said)


def _try(shared: PeerRows, device: torch.device) -> None:
    """Sum rows of all numbers with the others. Raises ``NoPeerMemory`` where a sum is wrong."""
    ranks = len(shared.peers)
    with torch.inference_mode():
        for count in (1, shared.rows) * _TRIALS:
            row = torch.arange(count, device=device).unsqueeze(1) % 8
            x = (row + 1 + shared.rank).expand(count, shared.width).to(shared.dtype).contiguous()
            all_reduce(x, x, shared)
            wanted = (row + 1) * ranks + ranks * (ranks - 1) // 2
            right = bool((x == wanted).all())
            if shared.words[GAVE_UP].item():
                raise NoPeerMemory("what another rank has written has not come")
            if not right:
                raise NoPeerMemory("a sum over it was wrong")
