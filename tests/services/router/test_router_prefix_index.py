"""What the router knows of engines' caches: their reports, what it sent, and never too much."""

from __future__ import annotations

import random

from penstock.protocol.prefix_digest import MAX_DIGESTS
from penstock.protocol.wire.messages.membership import PrefixReport
from penstock.services.router.prefix_index import MAX_SENT, MAX_TOLD, SENT_SECONDS, PrefixIndex


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big")


def chain(*numbers: int) -> bytes:
    return b"".join(map(digest, numbers))


def index_of(*incarnations: int) -> PrefixIndex:
    """Engines that hold nothing yet."""
    index = PrefixIndex()
    for incarnation in incarnations:
        index.take(incarnation, PrefixReport(0, 1))
    return index


def depths(index: PrefixIndex, prefix: bytes, incarnations: tuple[int, ...]) -> dict[int, int]:
    """How many of a prompt's digests each of these engines holds; those with none left out."""
    found = {one: depth for depth, bits in index.deepest(prefix) for one in index.engines_of(bits)}
    return {one: depth for one, depth in found.items() if one in incarnations}


def test_each_engine_is_known_by_the_longest_prefix_that_it_holds() -> None:
    index = index_of(1, 2, 3)
    index.take(1, PrefixReport(1, 2, chain(10, 11, 12)))
    index.take(2, PrefixReport(1, 2, chain(10)))
    assert depths(index, chain(10, 11, 12, 13), (1, 2, 3)) == {1: 3, 2: 1}
    assert depths(index, chain(10, 11, 12, 13), (2, 3)) == {2: 1}
    assert depths(index, chain(20, 21), (1, 2, 3)) == {}


def test_changes_come_and_go_and_a_report_of_all_replaces_what_was_known() -> None:
    index = index_of(1, 2)
    index.take(1, PrefixReport(1, 3, chain(10, 11)))
    index.take(2, PrefixReport(1, 2, chain(10)))
    index.take(1, PrefixReport(3, 4, b"", chain(11)))
    assert depths(index, chain(10, 11), (1, 2)) == {1: 1, 2: 1}
    index.take(1, PrefixReport(0, 9, chain(11)))
    assert depths(index, chain(10, 11), (1, 2)) == {1: 2, 2: 1}
    assert (index.version(1), index.version(2), index.version(3)) == (9, 2, 0)
    index.take(1, PrefixReport(0, 10))
    assert len(index) == 1


def test_a_change_of_what_was_missed_waits_for_what_was_missed() -> None:
    index = index_of(1)
    index.take(1, PrefixReport(3, 4, chain(12)))
    assert index.version(1) == 1
    assert depths(index, chain(12), (1,)) == {}
    index.take(1, PrefixReport(1, 4, chain(11, 12)))
    assert depths(index, chain(11, 12), (1,)) == {1: 2}
    index.take(1, PrefixReport(1, 3, b"", chain(12)))
    assert depths(index, chain(11, 12), (1,)) == {1: 2}, "an older report came late"


def test_what_was_sent_counts_until_the_beats_must_have_told_of_it() -> None:
    index = index_of(1, 2)
    index.sent(1, chain(10, 11), 100.0)
    index.sent(3, chain(10, 11), 100.0)
    assert depths(index, chain(10, 11), (1, 2, 3)) == {1: 2}, "3 has no prefix cache"
    index.take(1, PrefixReport(1, 2, chain(10)))
    index.expire(100.0 + SENT_SECONDS + 0.1)
    assert depths(index, chain(10, 11), (1, 2)) == {1: 1}


def test_of_a_lost_engine_nothing_is_left() -> None:
    index = index_of(1, 2)
    index.take(1, PrefixReport(1, 2, chain(10, 11)))
    index.take(2, PrefixReport(1, 2, chain(11)))
    index.sent(1, chain(20), 0.0)
    index.forget(1)
    index.forget(5)
    assert (depths(index, chain(10, 11, 20), (1, 2)), len(index)) == ({2: 2}, 1)
    index.take(3, PrefixReport(0, 1, chain(30)))
    assert depths(index, chain(11, 30), (2, 3)) == {2: 1, 3: 2}, "the places of both are their own"


def test_what_is_known_of_an_engine_is_bounded() -> None:
    index = index_of(1)
    numbers = random.Random(1)
    for at in range(300):
        prefix = b"".join(numbers.randbytes(8) for _ in range(3 * MAX_DIGESTS))
        index.sent(1, prefix, float(at) / 1000)
    assert len(index) == MAX_SENT
    most = b"".join(numbers.randbytes(8) for _ in range(3 * MAX_TOLD))
    index.take(1, PrefixReport(0, 2, most))
    index.take(1, PrefixReport(2, 3, most[: 8 * 1000]))
    assert len(index) == MAX_SENT + MAX_TOLD
    assert depths(index, most[: 8 * 10], (1,)) == {1: 10}, "those in latest use are kept"
    index.expire(1000.0)
    assert len(index) == MAX_TOLD


def test_malformed_digests_are_no_digests() -> None:
    index = index_of(1)
    index.take(1, PrefixReport(1, 2, chain(10) + b"abc", b"x"))
    assert depths(index, chain(10) + b"abc", (1,)) == {1: 1}


def test_the_longest_prefixes_come_first_and_each_engine_once() -> None:
    index = index_of(1, 2, 3)
    index.take(1, PrefixReport(1, 2, chain(10)))
    index.take(2, PrefixReport(1, 2, chain(10, 11, 12)))
    index.take(3, PrefixReport(1, 2, chain(10, 11)))
    found = [(depth, [*index.engines_of(bits)]) for depth, bits in index.deepest(chain(10, 11, 12))]
    assert found == [(3, [2]), (2, [3]), (1, [1])]
    index.forget(3)
    assert [depth for depth, _ in index.deepest(chain(10, 11, 12))] == [3, 1]
