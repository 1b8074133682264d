"""What the supervisor asks and tells while it keeps processes alive."""

from __future__ import annotations

from typing import Protocol

from penstock.protocol.wire.messages.membership import Peer
from penstock.services.launcher.processes import Child


class WatchedMembers(Protocol):
    """What the supervisor needs to know of the membership."""

    generation: int
    """Changes when ``fd`` is another one."""
    router_hangs: bool

    @property
    def fd(self) -> int: ...

    @property
    def joined(self) -> bool: ...

    def own(self) -> dict[int, Peer]: ...

    def pump(self, now: float) -> list[Peer]: ...

    def died(self, pid: int) -> None: ...


class Models(Protocol):
    """Whose processes come and go while the server runs."""

    def ended(self, child: Child, cause: str, *, excused: bool, now: float) -> bool:
        """Returns whether the ended process is not to be started again."""
        ...

    def spare_of(self, child: Child) -> Child | None:
        """A process that is prepared to take the place of one that has ended."""
        ...

    def tick(self, now: float) -> None: ...
