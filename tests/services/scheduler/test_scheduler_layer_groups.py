"""Plans for a worker whose layers are in groups, with windows or without."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.grouped_worker import GroupedWorker
from support.scheduler.scheduler_harness import Engine, prompt

from penstock.protocol.wire.messages.engine import CHUNK_ATTENTION, WINDOW_ATTENTION, LayerGroup
from penstock.services.scheduler.limits import Limits

FULL = LayerGroup()


def window(positions: int) -> LayerGroup:
    return LayerGroup(WINDOW_ATTENTION, positions)


def chunk(positions: int) -> LayerGroup:
    return LayerGroup(CHUNK_ATTENTION, positions)


def grouped_engine(groups: list[LayerGroup], **changes: int) -> tuple[Engine, GroupedWorker]:
    sizes = {
        "num_blocks": 60,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 200,
        "vocab_size": 100,
    }
    limits = Limits(**{**sizes, **changes}, groups=groups)
    engine = Engine(limits)
    worker: Any = GroupedWorker(limits, 1)
    engine.worker = worker
    return engine, worker


def test_a_long_answer_in_a_window_takes_a_few_blocks() -> None:
    engine, _ = grouped_engine([window(8)], num_blocks=12, max_num_seqs=1)
    engine.submit(1, prompt(60), max_tokens=100)
    most = 0
    for _ in range(130):
        engine.step()
        most = max(most, engine.core.stats().blocks_used)
    assert most <= 10  # 8 for the largest chunk, and what the window before it reaches into
    engine.run()
    engine.assert_finished(1)
    engine.assert_idle()


def test_a_prompt_behind_whole_chunks_is_found_again() -> None:
    engine, worker = grouped_engine([FULL, chunk(20)])
    engine.submit(1, prompt(61), max_tokens=4)
    engine.run()
    engine.submit(2, prompt(61), max_tokens=4)
    engine.run()
    assert worker.reused == 60
    engine.assert_finished(2)
    engine.assert_idle()


def test_the_last_window_of_a_prompt_is_enough_to_go_on_from() -> None:
    engine, worker = grouped_engine([FULL, window(8)])
    engine.submit(1, prompt(60), max_tokens=4)
    engine.run()
    engine.submit(2, prompt(60), max_tokens=4)
    engine.run()
    assert worker.reused == 56
    engine.assert_finished(2)
    engine.assert_idle()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 25))
def test_tokens_are_those_of_a_run_alone_whatever_the_groups(seed: int, requests: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    groups = rng.choice(
        [
            *([window(rng.randint(1, 12))], [FULL, window(rng.randint(1, 12))]),
            *([window(5), FULL, FULL], [FULL, chunk(rng.randint(1, 12))]),
        ]
    )
    engine, worker = grouped_engine(
        groups,
        block_size=size,
        num_blocks=len(groups) * (60 // size + 2),
        max_num_batched_tokens=rng.choice([4, 12, 60]),
        max_model_len=50,
    )
    prefixes = [[rng.randrange(48) for _ in range(30)] for _ in range(3)]
    for request_id in range(requests):
        own = [rng.randrange(48) for _ in range(rng.randint(1, 6))]
        tokens = rng.choice(prefixes)[: rng.randint(0, 30)] + own
        engine.submit(
            request_id, tokens, max_tokens=rng.choice([1, 5, 14]), n=rng.choice([1, 1, 3])
        )
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if rng.random() < 0.05:
            engine.cancel(rng.randrange(request_id + 1))
        if rng.random() < 0.1 and not worker.fail_steps:
            worker.fail_steps[engine.core._in_flight.last + 1] = "once"
    engine.run()
    for (request_id, choice), stream in engine.streams.items():
        if not stream.cancelled:
            engine.assert_finished(request_id, choice)
    engine.assert_idle()
