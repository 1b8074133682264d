"""Virtual tokens stand ahead of a prompt: they take positions and blocks, and nobody is told."""

from __future__ import annotations

import numpy as np
import pytest
from support.scheduler.kept_engine import Keeper, KeptEngine
from support.scheduler.scheduler_harness import Engine, prompt, small, token_work

from penstock.protocol.prefix_digest import BOUNDARIES, chain_root, extended, split
from penstock.protocol.wire.messages.administration import AdapterPlace
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.steps import AdapterLoaded
from penstock.services.scheduler.admission import make_request, make_sequences
from penstock.services.scheduler.engine_adapters import EngineAdapters


def test_the_worker_gets_them_first_and_the_client_never_hears_of_them() -> None:
    engine = Engine(small(num_blocks=64))
    engine.submit(1, prompt(9), virtual=6, max_tokens=3)
    engine.run()
    engine.assert_finished(1)
    (new,) = (new for plan in engine.plans for new in plan.added)
    assert np.frombuffer(new.tokens, "<i4").tolist() == [*range(100, 106), *prompt(9)]
    assert (new.virtual_tokens, new.prompt_len, new.adapter) == (6, 15, "soft")
    assert engine.core.counters.prompt_tokens == 9
    assert len(engine.streams[1, 0].received) == 3


def test_cached_tokens_are_those_of_the_clients_prompt() -> None:
    """Blocks of 4: of 6 virtual tokens and 9 others the first 12 are found, 6 of them virtual."""
    engine = Engine(small(num_blocks=64))
    for number, virtual in enumerate((6, 6, 0, 6)):
        given = prompt(9) if number < 3 else prompt(9, start=50)
        engine.submit(number, given, virtual=virtual, max_tokens=2)
        engine.run()
        engine.assert_finished(number)
    cached = [engine.streams[number, 0].cached for number in range(4)]
    assert cached == [0, 6, 0, 0]  # the base shares nothing; of the last one 4 virtual ones are


@pytest.mark.parametrize("chunk", [4, 7, 32])
def test_what_is_computed_does_not_depend_on_chunks_and_preemptions(chunk: int) -> None:
    """The simulated worker refuses wrong ids, and streams compare each token."""
    engine = Engine(small(max_num_batched_tokens=chunk, num_blocks=14))
    for number in range(4):
        engine.submit(number, prompt(11, number), virtual=5 * (number % 2), n=2, max_tokens=20)
    engine.run()
    for number in range(4):
        engine.assert_finished(number, 0)
        engine.assert_finished(number, 1)
    assert engine.core.counters.preemptions


def test_a_continuation_computes_them_again() -> None:
    engine = Engine(small(num_blocks=64))
    engine.submit(1, prompt(9), virtual=6, max_tokens=8)
    while len(engine.streams[1, 0].received) < 3:
        engine.step()
    received = list(engine.streams[1, 0].received)
    other = Engine(small(num_blocks=64))
    other.submit(
        1, prompt(9), virtual=6, max_tokens=8, outputs={0: received}, attempt=1, accepted=True
    )
    other.run()
    other.assert_finished(1)


def test_the_limit_counts_them_and_says_so() -> None:
    engine = Engine(small(num_blocks=64))  # 60 positions
    assert engine.submit(1, prompt(53), virtual=6, max_tokens=1) is None
    refused = engine.submit(2, prompt(54), virtual=6, max_tokens=1)
    assert refused is not None and refused.status == 400
    assert refused.message == (
        "the prompt has 54 tokens; with the 6 virtual tokens of its adapter and one token of "
        "output it is longer than the 60 tokens that this engine holds: shorten it to 53 tokens "
        "or less"
    )
    work = token_work(prompt(50), max_tokens=20, virtual=6)
    request = make_request(3, 0, "owner", work, 0.0, engine.limits)
    (sequence,) = make_sequences(request, work, engine.limits, iter(range(1)))
    assert (request.max_output, sequence.max_len, sequence.shown_prompt_len) == (4, 60, 50)


def test_prefixes_are_told_by_the_clients_tokens() -> None:
    """As tokenizers name them; where blocks end there, too."""
    limits = small(num_blocks=128, block_size=16, max_model_len=400, max_num_batched_tokens=256)
    for virtual, found in ((32, 2), (0, 2), (5, 0)):
        engine = Engine(limits)
        given = prompt(BOUNDARIES[1] + 20)
        engine.submit(1, given, virtual=virtual, max_tokens=2)
        engine.run()
        assert engine.core.prefixes is not None
        report = engine.core.prefixes.report(0)
        held = split(report.held) if report is not None else []
        work = token_work(given, virtual=virtual)
        names = split(extended(b"", chain_root(work.head), work.prompt))
        assert sorted(held) == sorted(names[:found])


def test_an_engine_tells_how_many_an_adapter_has() -> None:
    adapters = EngineAdapters(1, lambda message: True)
    adapters.load(AdapterPlace("soft", "/f", "1"))
    adapters.answered(1, AdapterLoaded("soft", "/f", "d1", virtual_tokens=20), 0.0)
    assert adapters.adapters == [Adapter("soft", "d1", 20)]


def test_blocks_that_are_kept_outside_are_found_with_the_same_soft_prompt_alone() -> None:
    """Blocks of 4: 6 virtual tokens and 21 others are 6 whole blocks, and 18 tokens of a client."""
    keeper, limits = Keeper(), small(num_blocks=64)
    first = KeptEngine(limits, keeper, after=1)
    first.submit(1, prompt(21), virtual=6, max_tokens=4)
    first.run()
    for virtual, found in ((6, 18), (0, 0)):
        other = KeptEngine(limits, keeper, after=1)
        other.submit(1, prompt(21), virtual=virtual, max_tokens=4)
        other.run()
        other.assert_finished(1)
        assert other.streams[1, 0].cached == found
        assert other.tier.counters.hits == (6 if found else 0)


@pytest.mark.parametrize("num_blocks", [12, 14])
def test_what_a_soft_prompt_lost_by_preemption_comes_from_outside(num_blocks: int) -> None:
    """The simulated worker refuses wrong content, and streams compare each token."""
    engine = KeptEngine(small(num_blocks=num_blocks), Keeper(), after=1)
    for number in range(4):
        engine.submit(number, prompt(11, 7 * number), virtual=5 * (number % 2), max_tokens=20)
    engine.run()
    for number in range(4):
        engine.assert_finished(number)
    assert engine.core.counters.preemptions and engine.tier.counters.hits
