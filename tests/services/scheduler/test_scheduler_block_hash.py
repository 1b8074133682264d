"""The name of a cached block: equal for equal prefixes under one salt, and for nothing else."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.scheduler.block_hash import chain_root, extend_hashes

BLOCK = 8
PROMPTS = st.lists(st.integers(0, 3), min_size=BLOCK, max_size=4 * BLOCK)
SALTS = st.sampled_from(["", "a", "b", "ab", "key:1", "key:", "\u00e9"])


def names(tokens: list[int], salt: str) -> list[bytes]:
    request = SimpleNamespace(root=chain_root(salt.encode()))
    sequence: Any = SimpleNamespace(hashes=[], tokens=array("i", tokens), request=request)
    return extend_hashes(sequence, len(tokens) // BLOCK, BLOCK)


@settings(max_examples=300, deadline=None)
@given(PROMPTS, SALTS, PROMPTS, SALTS)
def test_two_blocks_have_one_name_exactly_when_all_before_them_and_their_salts_are_equal(
    tokens: list[int], salt: str, others: list[int], other_salt: str
) -> None:
    named = {
        (salt, tuple(tokens[: (n + 1) * BLOCK])): name for n, name in enumerate(names(tokens, salt))
    }
    for n, name in enumerate(names(others, other_salt)):
        prefix = (other_salt, tuple(others[: (n + 1) * BLOCK]))
        assert named.get(prefix, name) == name
        named[prefix] = name
    assert len(set(named.values())) == len(named)


def test_a_block_that_comes_later_has_another_name_than_the_same_tokens_at_the_beginning() -> None:
    first, second = names([1] * 2 * BLOCK, "")
    assert first != second
