"""Between a worker and the holder of its host, which keeps the memory of finished weights.

They travel over a UNIX socket of the holder's (``penstock.protocol.wire.descriptors``) and not
between mailboxes: memory is handed over as open file descriptors, which nothing but such a socket
carries, and a list of what lies in it must not be parted from it. The holder looks into neither.

A worker that finds nothing loads the model and offers it over the same connection. While that is
open, others that want the same wait for it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_PIECES = 200
"""Of the memory of one model: fewer than a message can carry (253, ``SCM_MAX_FD``)."""
MAX_MANIFEST_BYTES = 16 << 20
"""Of a model of a hundred layers it is a tenth of a megabyte."""
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class WeightsKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which weights they are."""

    model: _Name
    """The first name under which it is served."""
    place: _Name
    """The device in whose memory they are."""
    digest: _Name
    """Of all that their bytes depend on: files, settings, code."""


class WeightsWanted(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Worker → holder. Others of the same model and place that are held are dropped."""

    key: WeightsKey


class WeightsOffered(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Worker → holder, with the descriptors of the pieces of memory: hold these."""

    key: WeightsKey
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    """What lies where in the pieces; the workers' own affair."""
    num_bytes: Annotated[int, Meta(ge=1, le=2**62)]


class WeightsHeld(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Holder → worker, with the descriptors: what is wanted is there. Empty and without them: it is
    not, and the worker loads it."""

    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)] = b""


class WeightsTaken(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Holder → worker: what was offered is held."""

    refused: Annotated[str, Meta(max_length=1000)] = ""
    """Why it is not; empty: it is."""


HolderMessage = WeightsWanted | WeightsOffered | WeightsHeld | WeightsTaken
