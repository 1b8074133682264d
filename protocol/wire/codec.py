"""Frames and messages.

A frame is the sender's incarnation (8 bytes, little endian) and one msgpack message. The prefix
lets a receiver drop what a fenced peer still sends without decoding it.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec
from msgspec import inspect

from penstock.protocol.wire.messages import (
    administration,
    hand_overs,
    kv_tier,
    membership,
    requests,
    steps,
    tokens,
)

PROTOCOL_VERSION = 46

Message = (
    membership.Hello
    | membership.Refused
    | membership.Beat
    | membership.BeatAnswer
    | membership.WhoAreYou
    | membership.Goodbye
    | membership.Died
    | membership.Fenced
    | membership.Members
    | membership.MetricsQuery
    | membership.MetricsAnswer
    | membership.Trace
    | membership.Traced
    | administration.Ask
    | administration.Told
    | requests.Submit
    | requests.Taken
    | requests.Enqueue
    | requests.Accepted
    | requests.Rejected
    | requests.Cancel
    | requests.Holding
    | requests.Unknown
    | tokens.TokenBatch
    | tokens.TextBatch
    | tokens.Continued
    | steps.Attach
    | steps.Attached
    | steps.StepPlan
    | steps.StepResult
    | steps.StepFailed
    | steps.LoadAdapter
    | steps.AdapterLoaded
    | steps.BringAdapter
    | steps.AdapterBrought
    | steps.DropAdapter
    | steps.NameAdapters
    | kv_tier.TierOpen
    | kv_tier.TierOpened
    | kv_tier.TierKeys
    | kv_tier.TierGet
    | kv_tier.TierGot
    | kv_tier.TierRelease
    | kv_tier.TierStored
    | kv_tier.TierLent
    | kv_tier.TierDrop
    | kv_tier.KVCopies
    | kv_tier.KVCopied
    | kv_tier.KVForget
    | hand_overs.DecodeRoom
)

_PREFIX = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_WORK_BYTES = MAX_FRAME_BYTES - 64 * 1024
"""An encoded ``Work``; the rest of its frame names the request and where to answer."""
MAX_PROMPT_BYTES = MAX_WORK_BYTES - 4 * 1024 * 1024
"""A prompt within a ``Work``. The sampling parameters have the rest: a grammar, lists of tokens."""


class MalformedFrame(ValueError):
    """The bytes are no message of this protocol."""


class Encoder:
    """Encodes messages of one process. Not thread safe: one a thread."""

    def __init__(self, incarnation: int) -> None:
        self._prefix = _PREFIX.pack(incarnation)
        self._encode = msgspec.msgpack.Encoder().encode_into
        self._buffer = bytearray(4096)

    def __call__(self, message: Message) -> bytes:
        buffer = self._buffer
        buffer[:PREFIX_BYTES] = self._prefix
        self._encode(message, buffer, PREFIX_BYTES)
        return bytes(buffer)


_decode = msgspec.msgpack.Decoder(Message).decode


def decode(frame: bytes | memoryview) -> tuple[int, Message]:
    """Return (sender's incarnation, message). Raises ``MalformedFrame`` and nothing else."""
    try:
        (sender,) = _PREFIX.unpack_from(frame)
        return sender, _decode(memoryview(frame)[PREFIX_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, struct.error) as error:
        raise MalformedFrame(str(error)) from None


def _describe(kind: inspect.Type, out: dict[str, str]) -> str:
    """A text for a type that changes whenever its layout on the wire, or its range, does.

    The same text on every version of Python: ``msgspec.inspect`` knows one form of each type.
    """
    if isinstance(kind, inspect.Metadata):
        return _describe(kind.type, out)
    if isinstance(kind, inspect.StructType):
        name, place = kind.cls.__name__, f"{kind.cls.__module__}.{kind.cls.__name__}"
        if place not in out:
            out[place] = ""
            fields = ",".join(f"{f.name}:{_describe(f.type, out)}" for f in kind.fields)
            out[place] = f"{name}#{kind.tag}({fields})"
        return name
    if isinstance(kind, inspect.EnumType):
        return f"{kind.cls.__name__}({','.join(f'{e.name}={e.value}' for e in kind.cls)})"
    if isinstance(kind, inspect.UnionType):
        return "|".join(sorted(_describe(part, out) for part in kind.types))
    limits = []
    for name in kind.__struct_fields__:
        value = getattr(kind, name)
        if isinstance(value, inspect.Type):
            limits.append(_describe(value, out))
        elif value is not None:
            limits.append(f"{name}={value}")
    return f"{type(kind).__name__}({','.join(limits)})"


def schema_hash() -> str:
    """16 hex digits over names, tags, order, types and ranges of every field of every message."""
    out: dict[str, str] = {}
    nested = (
        membership.Identity,
        membership.MetricsReport,
        requests.Work,
        requests.TokenWork,
        steps.SlotSampling,
    )
    for kind in (*Message.__args__, *nested):
        _describe(inspect.type_info(kind), out)
    return hashlib.sha256("\n".join(out.values()).encode()).hexdigest()[:16]


SCHEMA_HASH = schema_hash()
