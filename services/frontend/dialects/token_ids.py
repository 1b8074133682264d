"""Token ids in the JSON of the two endpoints, for ``return_token_ids``, as vLLM has them.

They are those of all generated tokens, whatever these became: thinking, a tool's call, the end. A
chunk holds those of its row; where a row makes several chunks, the first of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

NONE_MORE = b',"token_ids":[]'
"""What the further chunks of a row say."""


def listed(rows: Iterable[bytes]) -> list[int]:
    """The ids in rows of int32."""
    return array("i", b"".join(rows)).tolist()


def token_ids(rows: Iterable[bytes]) -> bytes:
    """The member ``token_ids``, with the comma before it."""
    return b',"token_ids":' + msgspec.json.encode(listed(rows))


def prompt_token_ids(prompt: bytes | None) -> bytes:
    """The member ``prompt_token_ids``, likewise; empty: the prompt has been told."""
    if prompt is None:
        return b""
    return b',"prompt_token_ids":' + msgspec.json.encode(listed([prompt]))
