"""Between an engine and the keeper, which holds KV blocks outside of the engine's memory.

The keeper's shared memory is cut into slots of one size, a block each. It lends a scheduler empty
ones, the worker copies blocks into them, and the scheduler says which block is where. To read, the
scheduler asks for blocks by their keys and is told the slots, which stay as they are until it
gives them back. The bytes themselves are in no message.
"""

from __future__ import annotations

import msgspec

KEY_BYTES = 16
"""A key is the name of a block in the scheduler's hash chain."""

STORES_AT_A_TIME, URGENT_STORES = 4, 2
"""A worker whose copies run beside steps has room for so many ``KVCopies`` that store, of
``Attached.kv_piece_bytes`` each: so many of what there is time for, and of what the next step
overwrites."""


class TierOpen(msgspec.Struct, frozen=True, array_like=True, tag=60, gc=False):
    """Scheduler → keeper: an engine with such blocks wants to keep them."""

    space: bytes
    """What a block's content depends on beside its tokens: weights, types, layout. Blocks of one
    space alone have the same key if and only if they have the same content."""
    slot_bytes: int
    """Of a block with the header before it."""
    lent: int
    """Empty slots that the scheduler wants to have at hand."""
    reply_to: str


class TierOpened(msgspec.Struct, frozen=True, array_like=True, tag=61, gc=False):
    """Keeper → scheduler: where the shared memory is; ``TierKeys`` follow."""

    space: bytes
    pool: str
    """The shared memory, for the processes of the same user on this host: see
    ``penstock.protocol.kv_slots.open_pool``. Empty without a refusal: the keeper does not know the
    scheduler (any more), which opens anew."""
    num_slots: int
    slots: list[int]
    """Lent to the scheduler."""
    refused: str = ""
    """Why nothing is kept for it; empty: it is."""


class TierKeys(msgspec.Struct, frozen=True, array_like=True, tag=62, gc=False):
    """Keeper → scheduler: blocks that can be had from now on, and that can no more."""

    space: bytes
    added: bytes = b""
    """Keys, one after another."""
    gone: bytes = b""


class TierGet(msgspec.Struct, frozen=True, array_like=True, tag=63, gc=False):
    """Scheduler → keeper: have these blocks in memory, and leave them there for a while."""

    number: int
    keys: bytes
    reply_to: str


class TierGot(msgspec.Struct, frozen=True, array_like=True, tag=64, gc=False):
    """Keeper → scheduler: where the first of the wanted blocks are, up to one that is not there, or
    those behind the ones that it was told before."""

    number: int
    slots: list[int]
    more: bool = False
    """Others are being read from disk, and another message follows."""


class TierRelease(msgspec.Struct, frozen=True, array_like=True, tag=65, gc=False):
    """Scheduler → keeper: what it got under this number is read."""

    number: int
    reply_to: str


class TierStored(msgspec.Struct, frozen=True, array_like=True, tag=66, gc=False):
    """Scheduler → keeper: these blocks are in these slots, which were lent."""

    keys: bytes
    slots: list[int]
    unused: list[int]
    """Lent slots that come back with nothing in them."""
    reply_to: str


class TierLent(msgspec.Struct, frozen=True, array_like=True, tag=67, gc=False):
    """Keeper → scheduler: further empty slots."""

    slots: list[int]


class TierDrop(msgspec.Struct, frozen=True, array_like=True, tag=68, gc=False):
    """Scheduler → keeper: these blocks must not be used any more."""

    keys: bytes
    corrupted: bool
    """Their content is not what was stored."""
    reply_to: str


class KVCopies(msgspec.Struct, frozen=True, array_like=True, tag=70, gc=False):
    """Scheduler → worker: copy blocks between KV memory and the keeper's.

    It is carried out, or begun where copies run beside steps, only directly behind the step that
    was planned last when it was sent, for the blocks may be others' before that one and behind the
    next one.
    """

    epoch: int
    after: int
    """Number of that step; 0: none was planned in this epoch."""
    number: int
    pool: str
    store: bool
    """From KV memory to the keeper; else from there."""
    blocks: list[int]
    slots: list[int]
    keys: bytes


class KVForget(msgspec.Struct, frozen=True, array_like=True, tag=72, gc=False):
    """Scheduler → worker, where copies run beside steps: what is still being copied under this
    number must not be written into KV memory behind the plans that follow. It is not answered."""

    epoch: int
    number: int


class KVCopied(msgspec.Struct, frozen=True, array_like=True, tag=71, gc=False):
    """Worker → scheduler."""

    epoch: int
    number: int
    done: int
    """So many of the blocks were copied, from the first one on."""
    seconds: float
    corrupted: bool = False
    """The one behind these is not what was stored."""
    failure: str = ""
    """Why not all were, where something is wrong."""


def joined(keys: list[bytes]) -> bytes:
    """Keys as messages carry them."""
    return b"".join(keys)


def split(keys: bytes) -> list[bytes]:
    """What ``joined`` has joined; what is left over of malformed ones is none."""
    whole = len(keys) - len(keys) % KEY_BYTES
    return [keys[at : at + KEY_BYTES] for at in range(0, whole, KEY_BYTES)]
