"""What an engine tells the router of its prefix cache: what is there, little at a time, and again
until the router has it."""

from __future__ import annotations

import random

import msgspec
import pytest
from support.scheduler.scheduler_harness import Engine, small, token_work

from penstock.protocol.prefix_digest import (
    BOUNDARIES,
    DIGEST_BYTES,
    chain_root,
    covered,
    extended,
    split,
)
from penstock.protocol.wire.messages.membership import PrefixReport
from penstock.protocol.wire.messages.steps import StepResult
from penstock.services.router.prefix_index import PrefixIndex
from penstock.services.scheduler import cached_prefixes
from penstock.services.scheduler.cached_prefixes import CachedPrefixes

LIMITS = small(
    num_blocks=120, block_size=16, max_model_len=700, max_num_batched_tokens=256, vocab_size=1000
)
NUMBER = 7


def prefix_of(tokens: list[int]) -> bytes:
    work = token_work(tokens)
    return extended(b"", chain_root(work.head), work.prompt)


class Watched:
    """An engine, and a router's knowledge of it."""

    def __init__(self) -> None:
        self.engine = Engine(LIMITS)
        self.router = PrefixIndex()

    @property
    def prefixes(self) -> CachedPrefixes:
        found = self.engine.core.prefixes
        assert found is not None
        return found

    def beat(self) -> PrefixReport | None:
        report = self.prefixes.report(self.router.version(NUMBER))
        if report is not None:
            self.router.take(NUMBER, report)
        return report

    def known(self, tokens: list[int]) -> int:
        """Tokens of a prompt that the router takes for cached."""
        for depth, bits in self.router.deepest(prefix_of(tokens)):
            if NUMBER in self.router.engines_of(bits):
                return covered(depth)
        return 0

    def cached(self, tokens: list[int], request: int) -> int:
        """The same, as the engine itself finds it when it runs the prompt."""
        self.engine.submit(request, tokens, max_tokens=1)
        self.engine.run()
        return self.engine.streams[request, 0].cached or 0


def test_the_router_knows_prompt_and_answer_after_one_beat() -> None:
    watched = Watched()
    engine = watched.engine
    prompt = [token % 900 for token in range(200)]
    engine.submit(1, prompt, max_tokens=150)
    engine.run()
    watched.beat()
    answered = prompt + engine.streams[1, 0].received
    assert watched.known(prompt) == 192
    assert watched.known([*answered, 1, 2, 3]) == 320
    assert watched.beat() is None, "nothing has changed"


def test_what_the_router_knows_is_what_the_cache_holds_while_blocks_come_and_go() -> None:
    watched, numbers = Watched(), random.Random(3)
    chats = [[numbers.randrange(900) for _ in range(150)] for _ in range(8)]
    for request in range(1, 80):
        chat = numbers.choice(chats)
        if len(chat) > 500:
            del chat[100:]
        chat += [numbers.randrange(900) for _ in range(numbers.randint(10, 90))]
        watched.beat()
        known, cached = watched.known(chat), watched.cached(chat, request)
        assert known <= cached < next((b for b in BOUNDARIES if b > known), 10**9)
    watched.engine.restart()
    watched.beat()
    assert len(watched.router) == 0


def test_a_lost_report_comes_again_with_what_followed() -> None:
    watched = Watched()
    watched.beat()
    for request in (1, 2):
        tokens = [request] * 200
        watched.engine.submit(request, tokens, max_tokens=2)
        watched.engine.run()
        watched.prefixes.report(watched.router.version(NUMBER))  # this one gets lost
    watched.beat()
    assert [watched.known([request] * 200) for request in (1, 2)] == [192, 192]


def test_an_engine_that_is_alone_tells_nothing_and_all_when_another_one_joins() -> None:
    watched = Watched()
    first, second, third = ([number] * 200 for number in (1, 2, 3))
    watched.engine.submit(1, first, max_tokens=2)
    watched.engine.run()
    watched.beat()
    watched.prefixes.tell(False)
    watched.engine.submit(2, second, max_tokens=2)
    watched.engine.run()
    assert watched.beat() is None
    watched.prefixes.tell(True)
    watched.engine.submit(3, third, max_tokens=2)
    watched.engine.run()
    watched.beat()
    assert [watched.known(tokens) for tokens in (first, second, third)] == [192, 192, 192]
    assert watched.beat() is None, "nothing has changed"


def test_no_sequence_is_looked_at_before_the_next_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, looks = Watched(), []
    look = CachedPrefixes._look
    monkeypatch.setattr(
        CachedPrefixes, "_look", lambda *given: looks.append(given[1]) or look(*given)
    )
    for request in (1, 2):
        watched.engine.submit(request, [request] * 200, max_tokens=20)
    watched.engine.run()
    assert looks == [], "steps have nothing to do with it"
    watched.beat()
    assert len(looks) == 2, "once each, though they were computed and have left"


def test_sequences_do_not_pile_up_where_no_beat_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prefixes, "MAX_UNSEEN", 3)
    watched = Watched()
    for request in range(1, 9):
        watched.engine.submit(request, [request] * 100, max_tokens=2)
        watched.engine.run()
        assert len(watched.prefixes._unseen) < 3
    watched.beat()
    assert [watched.known([request] * 100) for request in range(1, 9)] == [64] * 8


def test_a_new_router_is_told_all_at_once() -> None:
    watched = Watched()
    for request in (1, 2):
        watched.engine.submit(request, [request] * 200, max_tokens=2)
        watched.engine.run()
        watched.beat()
    watched.router = PrefixIndex()
    report = watched.beat()
    assert report is not None
    assert report.since == 0
    assert [watched.known([request] * 200) for request in (1, 2)] == [192, 192]


def test_digests_that_do_not_fit_a_prompt_are_told_nothing_of() -> None:
    """Whoever sent it makes none."""
    watched = Watched()
    watched.beat()
    core, worker = watched.engine.core, watched.engine.worker
    for number, prefix in enumerate((b"", b"x" * 8, b"x" * 80, b"odd")):
        work = msgspec.structs.replace(token_work([number] * 200, max_tokens=2), prefix=prefix)
        assert core.add(number, 0, "tokenizer", work, 0.0) is None
        while (plan := core.plan(0.0)) is not None:
            for answer in [worker.execute(plan)]:
                assert isinstance(answer, StepResult)
                core.apply(answer, 0.0)
    assert core.idle
    assert watched.beat() is None


def test_salts_are_told_apart() -> None:
    tokens = [9] * 200
    one, other = token_work(tokens, cache_salt="a"), token_work(tokens, cache_salt="b")
    assert not set(split(one.prefix)) & set(split(other.prefix))
    assert len(one.prefix) == DIGEST_BYTES * 3
