"""The hash chain that names a full block by its tokens and everything before them."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from penstock.protocol.wire.messages.requests import TOKEN_BYTES
from penstock.services.scheduler.kv_holder import SequenceHolder

BLOCK_HASH_BYTES = 16
"""128 bits: two different prefixes with one digest would show one user another's K and V."""
KEPT_CHAINS = 16
"""A chain of 128 Ki tokens takes 1.4 MB."""


class _Chain(NamedTuple):
    tokens: bytes
    hashes: list[bytes]


class BlockHasher:
    """Names the blocks of sequences.

    Prompts often begin alike. The latest chains are kept, so that what a prompt shares with one of
    them is compared, which takes a microsecond, and not hashed, which takes one for two blocks.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size, self._block_bytes = block_size, block_size * TOKEN_BYTES
        self._latest: OrderedDict[bytes, _Chain] = OrderedDict()
        """By the name of the first block; least lately used first, ``KEPT_CHAINS`` at most."""

    def extend(self, holder: SequenceHolder, count: int) -> list[bytes]:
        """Hash the first ``count`` blocks of a sequence, which must be full; return all so far."""
        hashes = holder.digests
        first = len(hashes)
        if first < count:
            size = self._block_size
            tokens = holder.tokens[first * size : count * size].tobytes()
            parent = hashes[-1] if hashes else holder.root
            if count == first + 1:  # what decoding adds
                hashes.append(blake2b(parent + tokens, digest_size=BLOCK_HASH_BYTES).digest())
            elif first == 0:
                self._begin(tokens, parent, hashes)
            else:
                self._chain(tokens, parent, hashes)
        return hashes

    def _begin(self, tokens: bytes, root: bytes, hashes: list[bytes]) -> None:
        """Fill the empty ``hashes`` of a sequence that begins with ``tokens``."""
        size = self._block_bytes
        self._chain(tokens[:size], root, hashes)
        name = hashes[0]
        known = self._latest.get(name)
        if known is not None:
            hashes += known.hashes[1 : _common_blocks(tokens, known.tokens, size)]
        self._chain(tokens[len(hashes) * size :], hashes[-1], hashes)
        self._latest[name] = _Chain(tokens, hashes.copy())
        self._latest.move_to_end(name)
        if len(self._latest) > KEPT_CHAINS:
            self._latest.popitem(last=False)

    def _chain(self, tokens: bytes, parent: bytes, hashes: list[bytes]) -> None:
        for start in range(0, len(tokens), self._block_bytes):
            block = tokens[start : start + self._block_bytes]
            parent = blake2b(parent + block, digest_size=BLOCK_HASH_BYTES).digest()
            hashes.append(parent)


def _common_blocks(one: bytes, other: bytes, size: int) -> int:
    """How many whole blocks of ``size`` bytes two texts begin with alike, the first of which is."""
    alike, most = 1, min(len(one), len(other)) // size
    while alike < most:
        middle = (alike + most + 1) // 2
        if one[alike * size : middle * size] == other[alike * size : middle * size]:
            alike = middle
        else:
            most = middle - 1
    return alike
