"""Digests of prefixes: equal for equal beginnings under one root, and for nothing else."""

from __future__ import annotations

import itertools
import os
from array import array

import pytest

from penstock.protocol.prefix_digest import (
    BOUNDARIES,
    DIGEST_BYTES,
    FIRST_STRIDE,
    LAST_BOUNDARY,
    MAX_DIGESTS,
    chain_root,
    extended,
    split,
)
from penstock.protocol.wire.messages.requests import RequestHead

HEAD = RequestHead(model="model")
ROOT = chain_root(HEAD)


def tokens(count: int, first: int = 0) -> bytes:
    return array("i", range(first, first + count)).tobytes()


def digests(prompt: bytes, root: bytes = ROOT) -> list[bytes]:
    return split(extended(b"", root, prompt))


def test_a_prompt_has_a_digest_for_each_boundary_that_it_reaches() -> None:
    assert digests(tokens(FIRST_STRIDE - 1)) == []
    for count in (64, 65, 127, 128, 1024, 1151, 1152, 5000):
        found = digests(tokens(count))
        assert len(found) == sum(boundary <= count for boundary in BOUNDARIES)
        assert {len(digest) for digest in found} == {DIGEST_BYTES}
        assert len(set(found)) == len(found)


def test_boundaries_are_an_eighth_of_what_they_cover_apart_at_most_and_end() -> None:
    pairs = list(itertools.pairwise(BOUNDARIES))
    assert all(after - before <= max(FIRST_STRIDE, before // 8) for before, after in pairs)
    assert BOUNDARIES[0] == FIRST_STRIDE
    assert BOUNDARIES[-1] == LAST_BOUNDARY
    assert MAX_DIGESTS == len(BOUNDARIES) < 100
    assert len(digests(tokens(LAST_BOUNDARY + 5000))) == MAX_DIGESTS


def test_digests_are_shared_as_far_as_the_tokens_are() -> None:
    one = tokens(1000)
    for shared in (0, 63, 64, 640, 700, 999):
        other = one[: 4 * shared] + tokens(2000 - shared, first=7000)
        same = [a == b for a, b in zip(digests(one), digests(other), strict=False)]
        assert sum(same) == sum(boundary <= shared for boundary in BOUNDARIES)
        assert same == sorted(same, reverse=True)


@pytest.mark.parametrize(
    "other",
    [
        RequestHead(),
        RequestHead(model="model", cache_salt="of a tenant"),
        RequestHead(model="model", adapter="of a tenant"),
        RequestHead(model="model", media=["a picture"]),
    ],
)
def test_another_model_salt_adapter_or_picture_shares_nothing(other: RequestHead) -> None:
    assert not set(digests(tokens(500))) & set(digests(tokens(500), chain_root(other)))


def test_who_asks_and_what_for_does_not_part_requests() -> None:
    other = RequestHead(model="model", tenant="somebody else", task="embed", request_id="7")
    assert chain_root(other) == ROOT


def test_digests_can_be_made_piece_by_piece() -> None:
    prompt = os.urandom(4 * 3000)
    whole = extended(b"", ROOT, prompt)
    for count in (0, 10, 64, 500, 1024, 1100, 1152, 2999, 3000):
        beginning = extended(b"", ROOT, prompt[: 4 * count])
        reached = len(beginning) // DIGEST_BYTES
        began = BOUNDARIES[reached - 1] if reached else 0
        assert extended(beginning, ROOT, prompt[4 * began :]) == whole


def test_a_rest_that_is_no_digest_is_left_out() -> None:
    whole = extended(b"", ROOT, tokens(200))
    assert split(whole[:-1]) == split(whole)[:-1]
