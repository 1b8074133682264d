"""The name of a cached block: equal for equal prefixes under one salt, and for nothing else."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.prefix_digest import chain_root
from penstock.protocol.wire.messages.requests import RequestHead
from penstock.services.scheduler.block_hash import KEPT_CHAINS, BlockHasher
from penstock.services.scheduler.kv_holder import SequenceHolder

BLOCK = 8
PROMPTS = st.lists(st.integers(0, 3), min_size=BLOCK, max_size=4 * BLOCK)
SALTS = st.sampled_from(["", "a", "b", "ab", "key:1", "key:", "\u00e9"])


def names(tokens: list[int], salt: str, hasher: BlockHasher | None = None) -> list[bytes]:
    holder = SequenceHolder(1, array("i", tokens), chain_root(RequestHead(cache_salt=salt)))
    return (hasher or BlockHasher(BLOCK)).extend(holder, len(tokens) // BLOCK)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(PROMPTS, SALTS), max_size=3 * KEPT_CHAINS))
def test_prompts_that_begin_alike_get_the_names_that_each_would_get_alone(
    prompts: list[tuple[list[int], str]],
) -> None:
    hasher = BlockHasher(BLOCK)
    for tokens, salt in prompts:
        assert names(tokens, salt, hasher) == names(tokens, salt)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=10))
def test_what_prompts_share_may_end_anywhere(length: int, shared: list[int]) -> None:
    hasher = BlockHasher(BLOCK)
    for number, blocks in enumerate(shared):
        tokens = [7] * BLOCK * min(blocks, length) + [number] * BLOCK * (length - blocks)
        assert names(tokens, "", hasher) == names(tokens, "")


def test_a_sequence_that_grows_is_named_on_from_where_it_was() -> None:
    tokens = list(range(6 * BLOCK))
    holder = SequenceHolder(1, array("i", tokens), chain_root(RequestHead()))
    hasher = BlockHasher(BLOCK)
    for count in (1, 3, 2, 6):
        assert hasher.extend(holder, count)[:count] == names(tokens[: count * BLOCK], "")
