"""Digests of a prompt's prefixes: by them the router knows which engine has computed one before.

A digest names the first ``BOUNDARIES[k]`` tokens of a sequence and the root they stand under. They
are chained, so two sequences share their first k digests if and only if they begin alike and have
the same root. The boundaries lie ``FIRST_STRIDE`` tokens apart at first, and further and further
apart behind that: the place where two sequences part is known to an eighth of it or to
``FIRST_STRIDE`` tokens, and the longest prompt has ``MAX_DIGESTS`` digests.

The tokenizer makes those of the prompt, the scheduler those of the output; the router only compares
them. They decide where a request runs, never which blocks it may read.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from penstock.protocol.wire.messages.requests import TOKEN_BYTES, RequestHead

_encode = msgspec.msgpack.Encoder().encode
DIGEST_BYTES = 8
FIRST_STRIDE = 64
"""Tokens; a prompt that is shorter has no digest and goes where there is room."""
STRIDES_AT_LEAST = 8
"""A stride is an eighth of what lies before it at most, the first ones excepted."""
LAST_BOUNDARY = 1 << 20
"""Tokens; what lies behind is named by nothing."""


def _boundaries() -> tuple[int, ...]:
    found, position, stride = [], 0, FIRST_STRIDE
    while position < LAST_BOUNDARY:
        if position >= 2 * STRIDES_AT_LEAST * stride:
            stride *= 2
        position += stride
        found.append(position)
    return tuple(found)


BOUNDARIES = _boundaries()
"""Tokens that each digest covers, ascending."""
MAX_DIGESTS = len(BOUNDARIES)


def chain_root(head: RequestHead) -> bytes:
    """What the chains of a request's digests and of its KV blocks begin with; 16 bytes. Requests
    share what is computed only where all that K and V depend on beside the tokens is the same, and
    the salt."""
    parts = (head.model, head.adapter, head.media, head.cache_salt)
    return blake2b(_encode(parts), digest_size=16).digest()


def extended(digests: bytes, root: bytes, tokens: bytes | memoryview) -> bytes:
    """``digests`` of a sequence with all that follow from its ``tokens``.

    Args:
        digests: those of a beginning of the sequence, one after another; at first none.
        root: see ``chain_root``.
        tokens: int32 ids, little endian, from the last of these digests' boundaries on.
    """
    count = len(digests) // DIGEST_BYTES
    began = covered(count)
    end = began + len(tokens) // TOKEN_BYTES
    parent = digests[-DIGEST_BYTES:] or root
    found, start = [digests], 0
    for boundary in BOUNDARIES[count:]:
        if boundary > end:
            break
        stop = (boundary - began) * TOKEN_BYTES
        hasher = blake2b(parent, digest_size=DIGEST_BYTES)
        hasher.update(tokens[start:stop])
        parent = hasher.digest()
        found.append(parent)
        start = stop
    return b"".join(found)


def split(digests: bytes) -> list[bytes]:
    """The digests one by one; what is left at the end of malformed ones is none."""
    whole = len(digests) - len(digests) % DIGEST_BYTES
    return [digests[at : at + DIGEST_BYTES] for at in range(0, whole, DIGEST_BYTES)]


def covered(count: int) -> int:
    """Tokens that the first ``count`` digests of a sequence cover."""
    return BOUNDARIES[min(count, MAX_DIGESTS) - 1] if count else 0
