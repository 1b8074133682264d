"""Prefill chunks, the prefix cache, and what happens when KV memory runs out."""

from __future__ import annotations

from support.scheduler.scheduler_harness import Engine, prompt, small, token_work

from penstock.protocol.wire.messages.tokens import EndReason


def test_a_long_prompt_is_computed_in_chunks_beside_decode() -> None:
    engine = Engine(small(max_num_batched_tokens=8))
    engine.submit(1, prompt(3), max_tokens=12)
    engine.plan()
    engine.submit(2, prompt(20, 50), max_tokens=2)
    engine.run()
    counts = [chunk.count for plan in engine.plans[1:] for chunk in plan.chunks]
    assert counts == [7, 7, 6]  # one token of each step belongs to the decode row
    assert all(len(plan.chunks) == 1 for plan in engine.plans[1:4])
    engine.assert_finished(1)
    engine.assert_finished(2)


def test_prompts_share_a_step_up_to_the_budget() -> None:
    engine = Engine(small(max_num_batched_tokens=16))
    for request_id in range(4):
        engine.submit(request_id, prompt(6, 20 * request_id))
    plan = engine.plan()
    assert plan is not None
    assert [(chunk.count, chunk.sample) for chunk in plan.chunks] == [
        (6, True),
        (6, True),
        (4, False),
    ]
    engine.run()
    for request_id in range(4):
        engine.assert_finished(request_id)


def test_a_prompt_seen_before_is_computed_only_in_its_last_block() -> None:
    engine = Engine()
    engine.submit(1, prompt(16))
    engine.run()
    engine.submit(2, prompt(16))
    engine.run()
    assert engine.streams[1, 0].cached == 0
    assert engine.streams[2, 0].cached == 12  # the last token's block is computed again
    assert engine.tokens(1) == engine.tokens(2)
    counters = engine.core.stats().counters
    assert (counters.prefix_hit_tokens, counters.prefix_query_tokens) == (12, 32)


def test_the_first_row_says_how_long_its_request_waited_to_run() -> None:
    engine = Engine(small(max_num_seqs=1))
    engine.submit(1, prompt(4))
    engine.submit(2, prompt(4, start=50))
    engine.now += 0.5
    engine.run()
    assert engine.streams[1, 0].queued_s == 0.5
    assert engine.plan() is None
    queued = engine.streams[2, 0].queued_s
    assert queued is not None and queued >= 0.5


def test_requests_of_one_step_with_one_prefix_compute_it_once() -> None:
    engine = Engine()
    shared = prompt(24)
    for request_id in range(8):
        engine.submit(request_id, [*shared, request_id], seed=request_id)
    plan = engine.plan()
    assert plan is not None
    assert [chunk.count for chunk in plan.chunks] == [25] + [1] * 7
    engine.run()
    for request_id in range(8):
        engine.assert_finished(request_id)


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    engine = Engine()
    engine.submit(1, prompt(10), max_tokens=12)
    engine.run()
    engine.submit(2, prompt(10) + engine.tokens(1) + [5])
    engine.run()
    assert engine.streams[2, 0].cached == 20  # 21 of 22 tokens were computed: 5 blocks of 4


def test_requests_with_different_salts_share_nothing() -> None:
    engine = Engine()
    engine.submit(1, prompt(16), cache_salt="a")
    engine.run()
    engine.submit(2, prompt(16), cache_salt="b")
    engine.submit(3, prompt(16))
    engine.submit(4, prompt(16), cache_salt="a")
    engine.run()
    assert [engine.streams[i, 0].cached for i in (1, 2, 3, 4)] == [0, 0, 0, 12]


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    engine = Engine(caching=False)
    for request_id in range(2):
        engine.submit(request_id, prompt(16), n=2)
        engine.run()
        engine.assert_finished(request_id, 0)
        engine.assert_finished(request_id, 1)
    stats = engine.core.stats()
    assert stats.counters.prefix_query_tokens == 0
    assert stats.blocks_free == stats.blocks_total


def test_siblings_wait_for_the_first_ones_prompt_and_reuse_its_blocks() -> None:
    engine = Engine(small(max_num_batched_tokens=8, max_num_seqs=8))
    engine.submit(1, prompt(20), n=4, max_tokens=3)
    engine.submit(2, prompt(4, 50), max_tokens=3)
    first, second = engine.plan(), engine.plan()
    assert first is not None and second is not None
    assert len(first.added) == 1 and len(second.added) == 0
    engine.run()
    for choice in range(4):
        engine.assert_finished(1, choice)
    computed = sum(chunk.count for plan in engine.plans for chunk in plan.chunks)
    assert computed == 20 + 3 * 4 + 4
    engine.assert_finished(2)


def test_siblings_start_when_the_first_one_is_cancelled_before_its_prompt_is_done() -> None:
    engine = Engine(small(max_num_batched_tokens=8, max_num_seqs=8))
    engine.submit(1, prompt(20), n=3)
    engine.plan()
    engine.cancel(1, choice=0)
    engine.run()
    engine.assert_finished(1, 1)
    engine.assert_finished(1, 2)
    engine.assert_idle()


def test_blocks_that_a_request_computed_itself_do_not_count_as_found() -> None:
    engine = Engine(small(max_num_batched_tokens=8))
    engine.worker.fail_steps[3] = "device lost"
    engine.submit(1, prompt(24))
    engine.run()
    assert engine.core.stats().counters.prefix_hit_tokens > 0
    assert engine.streams[1, 0].cached == 0
    engine.assert_finished(1)


def test_preemption_frees_the_latest_arrival_and_changes_no_token() -> None:
    engine = Engine(small(num_blocks=15, max_num_batched_tokens=60))
    for request_id in range(4):
        engine.submit(request_id, prompt(6, 20 * request_id), max_tokens=20, age=-request_id)
    engine.run()
    for request_id in range(4):
        engine.assert_finished(request_id)
    assert engine.core.stats().counters.preemptions > 0
    engine.assert_idle()


def test_nothing_new_is_admitted_while_running_sequences_need_the_blocks() -> None:
    engine = Engine(small(num_blocks=6))
    engine.submit(1, prompt(8), max_tokens=9)
    engine.plan()
    engine.submit(2, prompt(16, 40), max_tokens=2)
    plan = engine.plan()
    assert plan is not None and not plan.added
    engine.run()
    assert engine.core.stats().counters.preemptions == 0
    engine.assert_finished(1)
    engine.assert_finished(2)


def test_admission_leaves_every_running_sequence_its_next_block() -> None:
    engine = Engine(small(num_blocks=6, max_num_seqs=6))
    for request_id in range(6):
        engine.submit(request_id, prompt(4, 10 * request_id), max_tokens=5)
    plan = engine.plan()
    assert plan is not None and len(plan.added) == 3  # of two blocks each
    engine.run()
    assert engine.core.stats().counters.preemptions == 0
    for request_id in range(6):
        engine.assert_finished(request_id)


def test_a_step_that_preempts_admits_nothing() -> None:
    engine = Engine(small(num_blocks=8, max_num_seqs=2))
    engine.submit(1, prompt(12), max_tokens=20, age=5.0)
    engine.submit(2, prompt(12, 40), max_tokens=20, age=4.0)
    engine.plan()
    engine.submit(3, prompt(2, 80), max_tokens=4, age=9.0, outputs={0: []})
    work = token_work(prompt(2, 80), outputs={0: [3]}, age=4.5)
    assert engine.core.add(4, 0, "tokenizer", work, 0.0) is None
    while engine.core.stats().counters.preemptions == 0:
        engine.deliver()
        plan = engine.plan()
    assert plan is not None and not plan.added and plan.gone
    engine.core.cancel(4, 0)
    engine.run()
    for request_id in (1, 2, 3):
        engine.assert_finished(request_id)


def test_the_least_urgent_gives_way_under_the_priority_policy() -> None:
    engine = Engine(small(num_blocks=8, max_num_batched_tokens=60), policy="priority")
    engine.submit(1, prompt(6), max_tokens=20, priority=5)
    engine.submit(2, prompt(6, 40), max_tokens=20, priority=1)
    engine.run()
    assert engine.core.stats().counters.preemptions >= 1
    assert engine.started[-1] == 1
    engine.assert_finished(1)
    engine.assert_finished(2)


def test_urgent_requests_start_first_under_the_priority_policy() -> None:
    engine = Engine(small(max_num_seqs=1), policy="priority")
    engine.submit(1, prompt(5), priority=3)
    engine.submit(2, prompt(6), priority=1)
    plan = engine.plan()
    assert plan is not None and len(plan.added[0].tokens) == 24


def test_a_sequence_that_cannot_grow_with_the_engine_for_itself_ends_by_length() -> None:
    engine = Engine(small(num_blocks=8))
    engine.submit(1, prompt(4), max_tokens=20)
    engine.plan()
    engine.core._planner.kv.blocks.allocate(7)  # a leak: nothing else can bring this about
    assert engine.core.plan(0.0) is None
    ((_, batch),) = engine.core.expire(0.0)
    assert batch.ends[0].reason is EndReason.LENGTH
    assert engine.core.stats().open_requests == 0


def test_blocks_of_another_size_are_named_anew() -> None:
    engine = Engine(small())
    for request_id in (1, 2):
        engine.submit(request_id, [1, 2, 3, 4, *[request_id] * 4, 9], max_tokens=9)
        engine.step()
    engine.restart(small(block_size=8))
    engine.run()
    engine.assert_finished(1)
    engine.assert_finished(2)
    engine.assert_idle()


def test_a_lone_sequence_waits_for_blocks_that_a_transfer_holds() -> None:
    engine = Engine(small(num_blocks=8))
    engine.submit(1, prompt(4), max_tokens=20)
    engine.step()
    kv = engine.core._planner.kv
    transfer = kv.expect([bytes([number]) for number in range(6)])
    assert transfer is not None
    for _ in range(20):
        engine.step()
    assert engine.core.stats().waiting == 1
    kv.release(transfer)
    engine.run()
    engine.assert_finished(1)
    engine.assert_idle()
