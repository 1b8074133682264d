"""How a KV block lies outside of an engine's memory, in the keeper's slots and in its files.

A block's bytes follow a header that says what they are and has their checksum. The worker writes
it, and whoever takes a block looks whether it fits what is wanted: a slot that was given to others
meanwhile, a file that was cut or damaged, or one of another model is then no block at all.
"""

from __future__ import annotations

import struct
import zlib

_HEADER = struct.Struct("<8s16s16sQI12x")
HEADER_BYTES = _HEADER.size
SPACE_BYTES = 16
_MAGIC = b"PSTKKV01"
_ALIGNMENT = 64


def slot_bytes(block_bytes: int) -> int:
    """Bytes of a slot for blocks of so many bytes."""
    return -(-(HEADER_BYTES + block_bytes) // _ALIGNMENT) * _ALIGNMENT


def seal(slot: memoryview, space: bytes, key: bytes, block_bytes: int) -> None:
    """Write the header of a block whose bytes are in the slot."""
    checksum = zlib.crc32(slot[HEADER_BYTES : HEADER_BYTES + block_bytes])
    _HEADER.pack_into(slot, 0, _MAGIC, space, key, block_bytes, checksum)


def holds(slot: memoryview, space: bytes, key: bytes) -> bool:
    """Whether this block is in the slot, whole."""
    magic, found_space, found_key, block_bytes, checksum = _HEADER.unpack_from(slot)
    if (magic, found_space, found_key) != (_MAGIC, space, key):
        return False
    if HEADER_BYTES + block_bytes > len(slot):
        return False
    return bool(zlib.crc32(slot[HEADER_BYTES : HEADER_BYTES + block_bytes]) == checksum)
