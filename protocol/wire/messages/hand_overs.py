"""What engines say to each other where prompts are computed by some and continued by others."""

from __future__ import annotations

import msgspec


class DecodeRoom(msgspec.Struct, frozen=True, array_like=True, tag=80, gc=False):
    """Engine that decodes → each prefill engine of its model: what it could take over now. Sent
    when that has changed, and each second, since a message may be lost."""

    sequences: int
    """Slots that neither run nor are waited for."""
    blocks: int
    """Blocks of KV memory, likewise, that nobody holds or the prefix cache can do without."""
