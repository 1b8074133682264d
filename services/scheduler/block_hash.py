"""The hash chain that names a full block by its tokens and everything before them."""

from __future__ import annotations

from hashlib import blake2b

from penstock.services.scheduler.sequence import Sequence

DIGEST_BYTES = 16
"""128 bits: two different prefixes with one digest would show one user another's K and V."""


def chain_root(cache_salt: bytes) -> bytes:
    """Parent of a sequence's first block. Requests with different salts share no blocks."""
    return blake2b(cache_salt, digest_size=DIGEST_BYTES).digest()


def extend_hashes(sequence: Sequence, count: int, block_size: int) -> list[bytes]:
    """Hash the first ``count`` blocks of a sequence, which must be full; return all so far."""
    hashes = sequence.hashes
    first = len(hashes)
    if first < count:
        parent = hashes[-1] if hashes else sequence.request.root
        tokens = sequence.tokens[first * block_size : count * block_size].tobytes()
        block_bytes = 4 * block_size
        for start in range(0, len(tokens), block_bytes):
            chunk = tokens[start : start + block_bytes]
            parent = blake2b(parent + chunk, digest_size=DIGEST_BYTES).digest()
            hashes.append(parent)
    return hashes
