"""A connection to the router of a server on this host, by which its processes are seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.protocol.process.onlooker import Onlooker

JOIN_S = 3.0


@contextlib.contextmanager
def joined(router: str) -> Iterator[Onlooker | None]:
    """``None`` where the router does not answer, or asks for a secret that is not known here."""
    from penstock.protocol.config import ClusterConfig
    from penstock.protocol.process.onlooker import Onlooker
    from penstock.protocol.process.participant import Ended
    from penstock.protocol.wire.addresses import AddressError
    from penstock.protocol.wire.security import SecurityError

    with contextlib.ExitStack() as stack:
        members = None
        with contextlib.suppress(AddressError, SecurityError, Ended):
            found = stack.enter_context(Onlooker(ClusterConfig(router=router)))
            members = found if found.join(JOIN_S) else None
        yield members
