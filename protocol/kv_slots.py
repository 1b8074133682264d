"""How a KV block lies outside of an engine's memory, in the keeper's slots and in its files.

A block's bytes follow a header that says what they are and has their checksum. The worker writes
it, and whoever takes a block looks whether it fits what is wanted: a slot that was given to others
meanwhile, a file that was cut or damaged, or one of another model is then no block at all. Others
may write into a slot at any time; so blocks are sealed and checked in memory of one's own.
"""

from __future__ import annotations

import os
import re
import struct
import zlib

_HEADER = struct.Struct("<8s16s16sQI12x")
HEADER_BYTES = _HEADER.size
SPACE_BYTES = 16
_MAGIC = b"PSTKKV02"
_ROW_WORDS = 512
_STRIPE_ROWS = 64
"""Rows that are added up before the CRC sees them."""
_ALIGNMENT = 64
_POOL = re.compile(r"(/proc/\d+/fd/\d+) (penstock-kv-[0-9a-f]+-(\d+)x(\d+))")


def slot_bytes(block_bytes: int) -> int:
    """Bytes of a slot for blocks of so many bytes."""
    return -(-(HEADER_BYTES + block_bytes) // _ALIGNMENT) * _ALIGNMENT


def pool_name(nonce: str, num_slots: int, slot_bytes: int) -> str:
    """Of the keeper's shared memory. ``nonce``, in hexadecimal, tells it from all others."""
    return f"penstock-kv-{nonce}-{num_slots}x{slot_bytes}"


def open_pool(pool: str, slot_bytes: int) -> int:
    """A descriptor of shared memory that its keeper calls ``/proc/PID/fd/NUMBER NAME``.

    The keeper may be gone and its number another process's by now, so what is opened is looked at.
    Raises ``OSError`` where there is nothing, ``ValueError`` where it is something else.
    """
    told = _POOL.fullmatch(pool)
    if told is None or int(told[4]) != slot_bytes:
        raise ValueError(f"{pool!r} is no shared memory of blocks of {slot_bytes} bytes")
    descriptor = os.open(told[1], os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    is_it = os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:{told[2]} (deleted)"
    if not is_it or os.fstat(descriptor).st_size != int(told[3]) * slot_bytes:
        os.close(descriptor)
        raise ValueError(f"{told[1]} is not the shared memory {told[2]} (any more)")
    return descriptor


def seal(slot: memoryview, space: bytes, key: bytes, block_bytes: int) -> None:
    """Write the header of a block whose bytes are in the slot."""
    checksum = _checksum(slot[HEADER_BYTES : HEADER_BYTES + block_bytes])
    _HEADER.pack_into(slot, 0, _MAGIC, space, key, block_bytes, checksum)


def holds(slot: memoryview, space: bytes, key: bytes) -> bool:
    """Whether this block is in the slot, whole."""
    magic, found_space, found_key, block_bytes, checksum = _HEADER.unpack_from(slot)
    if (magic, found_space, found_key) != (_MAGIC, space, key):
        return False
    if HEADER_BYTES + block_bytes > len(slot):
        return False
    return bool(_checksum(slot[HEADER_BYTES : HEADER_BYTES + block_bytes]) == checksum)


def _checksum(content: memoryview) -> int:
    """The CRC-32 of sums: of each stripe of 64 rows the 512 sums of its columns, which are words of
    64 bits, modulo 2^64; behind them what fills no stripe, as it is.

    One changed word changes a sum. Adding is as fast as the memory is read, where a CRC of all of
    it takes most of the time of a copy.
    """
    import numpy as np  # only who has blocks needs it

    stripe = 8 * _ROW_WORDS * _STRIPE_ROWS
    whole = len(content) - len(content) % stripe
    words = np.frombuffer(content[:whole], np.uint64).reshape(-1, _STRIPE_ROWS, _ROW_WORDS)
    sums = np.add.reduce(words, axis=1)
    return zlib.crc32(content[whole:], zlib.crc32(sums.tobytes()))
