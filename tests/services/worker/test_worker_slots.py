"""Which plans are refused, and how slots change; the null engine runs the same slots."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from support.counted import instructions
from support.worker.plan_driver import GREEDY, PlanDriver

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    SlotAdjustments,
    SlotSampling,
    StepPlan,
)
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.slot_history import history
from penstock.services.worker.slots import PlanError, SlotTable

CAPACITY = EngineSizes(
    num_blocks=10,
    block_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=40,
    vocab_size=50,
)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


PENALISED = msgspec.structs.replace(GREEDY, adjustments=SlotAdjustments(repetition=2.0)).packed()
BIASED = msgspec.structs.replace(GREEDY, adjustments=SlotAdjustments(frequency=2.0)).packed()


def new(slot: int = 0, **changes: object) -> NewSlot:
    fields = {
        "slot": slot,
        "tokens": ids(1, 2, 3, 4, 5),
        "prompt_len": 5,
        "num_computed": 0,
        "blocks": [slot],
        "sampling": GREEDY.packed(),
    }
    return NewSlot(**(fields | changes))  # type: ignore[arg-type]


def plan(step: int, **parts: object) -> StepPlan:
    fields = {"gone": [], "added": [], "grown": [], "chunks": [], "epoch": 1, "full": step == 1}
    return StepPlan(step=step, **(fields | parts))  # type: ignore[arg-type]


def run(table: SlotTable, wanted: StepPlan) -> list[int]:
    step = table.apply(wanted)
    table.finish(step, np.arange(len(step.sampled), dtype=np.int32))
    return [int(slot) for slot in step.sampled]


def decoding_table(slots: tuple[int, ...] = (0, 1)) -> SlotTable:
    table = SlotTable(CAPACITY)
    chunks = [Chunk(slot, 0, 5, True, []) for slot in slots]
    run(table, plan(1, added=[new(slot) for slot in slots], chunks=chunks))
    return table


def test_rows_are_decoding_slots_ascending_then_sampling_chunks_in_plan_order() -> None:
    table = SlotTable(CAPACITY)
    chunks = [Chunk(3, 0, 5, True, []), Chunk(1, 0, 5, True, []), Chunk(0, 0, 2, False, [])]
    assert run(table, plan(1, added=[new(0), new(1), new(3)], chunks=chunks)) == [3, 1]
    assert run(table, plan(2, chunks=[Chunk(0, 2, 3, True, [])])) == [1, 3, 0]
    assert run(table, plan(3)) == [0, 1, 3]
    again = plan(4, gone=[1], added=[new(1), new(2)], chunks=[Chunk(2, 0, 5, True, [])])
    assert run(table, again) == [0, 3, 2]
    assert run(table, plan(5, gone=[0], grown=[3, 9])) == [2, 3]


def test_a_decoding_slot_moves_one_position_and_counts_its_outputs() -> None:
    table = decoding_table()
    assert table.position[:2].tolist() == [5, 5]
    assert table.num_output[:2].tolist() == [1, 1]
    run(table, plan(2))
    assert table.position[:2].tolist() == [6, 6]
    assert table.num_output[:2].tolist() == [2, 2]
    assert table.last_token[:2].tolist() == [0, 1]


def test_output_tokens_of_a_continuation_count() -> None:
    table = SlotTable(CAPACITY)
    run(table, plan(1, added=[new(2, prompt_len=3)], chunks=[Chunk(2, 0, 5, True, [])]))
    assert table.num_output[2] == 3


def test_a_slot_computes_from_the_position_that_its_tokens_begin_at() -> None:
    table = SlotTable(CAPACITY)
    part = new(tokens=ids(9, 10, 11, 12), prompt_len=10, num_computed=8, start=8, blocks=[3])
    added = plan(1, added=[part], chunks=[Chunk(0, 8, 3, False, [4])])
    (chunk,) = table.apply(added).chunks
    assert (chunk.start, chunk.tokens.tolist()) == (8, [9, 10, 11])
    last = table.apply(plan(2, chunks=[Chunk(0, 11, 1, True, [])]))
    assert (last.chunks[0].start, last.chunks[0].tokens.tolist()) == (11, [12])
    assert table.num_output[0] == 2


def test_what_adjustments_read_is_the_same_however_it_was_sent() -> None:
    tokens = np.arange(20, 32, dtype="<i4")
    whole = new(tokens=tokens.tobytes(), prompt_len=9)
    for start in (0, 4, 8, 9):
        sent = new(tokens=tokens[start:].tobytes(), prompt_len=9, start=start, prompt=1)
        found = history(sent, [b"", tokens[:9].tobytes()])
        assert found.prompt.tolist() == history(whole).prompt.tolist() == tokens[:9].tolist()
        assert found.output.tolist() == history(whole).output.tolist() == tokens[9:].tolist()
        assert history(msgspec.structs.replace(sent, prompt=-1)).output.tolist() == [29, 30, 31]


def test_a_reused_slot_is_reset_whole() -> None:
    table = SlotTable(CAPACITY)
    sampling = SlotSampling(0.7, 5, 0.5, 2**64 - 1)
    first = new(0, sampling=sampling.packed(), choice=3, blocks=[1, 2, 3])
    run(table, plan(1, added=[first], chunks=[Chunk(0, 0, 5, True, [])]))
    run(table, plan(2, gone=[0], added=[new(0, blocks=[9])], chunks=[Chunk(0, 0, 5, True, [])]))
    state = (table.temperature[0], table.top_k[0], table.top_p[0], table.seed[0], table.choice[0])
    assert state == (0.0, 0, 1.0, 0, 0)
    assert (table.blocks.length[0], table.blocks.tables[0][0, 0], table.num_output[0]) == (1, 9, 1)


def test_a_full_plan_drops_every_slot() -> None:
    table = decoding_table()
    full = plan(7, full=True, added=[new(0)], chunks=[Chunk(0, 0, 5, True, [])])
    assert run(table, full) == [0]
    assert run(table, plan(8)) == [0]


BAD_FIRST: dict[str, tuple[dict[str, object], str]] = {
    "a first plan that is not full": ({"full": False}, "full plan"),
    "a slot past the last": ({"added": [new(4)]}, "slot 4: slots are 0 … 3"),
    "a negative slot": ({"added": [new(-1)]}, "slot -1"),
    "a slot added twice": ({"added": [new(0), new(0)]}, "in use"),
    "no tokens": ({"added": [new(0, tokens=b"")]}, "0 tokens; allowed are 1 … 40"),
    "half a token": ({"added": [new(0, tokens=b"abcde")]}, "5 bytes"),
    "too many tokens": ({"added": [new(0, tokens=ids(*range(41)))]}, "41 tokens"),
    "a token past the vocabulary": ({"added": [new(0, tokens=ids(50))]}, "0 … 49"),
    "a negative token": ({"added": [new(0, tokens=ids(-1))]}, "0 … 49"),
    "a prompt longer than its tokens": ({"added": [new(0, prompt_len=6)]}, "prompt_len 6"),
    "tokens from behind what is computed": ({"added": [new(0, start=1)]}, "from position 1 on"),
    "a prompt that is not in the plan": ({"added": [new(0, prompt=0)]}, "prompt 0 of 0"),
    "another one's prompt": (
        {"added": [new(0, prompt=0)], "prompts": [ids(1, 2)]},
        "not its prompt of 5 tokens",
    ),
    "a prompt past the vocabulary": (
        {"added": [new(0, prompt=0)], "prompts": [ids(1, 2, 3, 4, 50)]},
        "0 … 49",
    ),
    "penalties without their prompt": (
        {"added": [new(0, num_computed=5, start=5, sampling=PENALISED)]},
        "read the prompt",
    ),
    "adjustments without their output": (
        {"added": [new(0, prompt_len=1, num_computed=5, start=5, sampling=BIASED)]},
        "its output",
    ),
    "all positions computed": ({"added": [new(0, num_computed=5)]}, "nothing to compute"),
    "computed positions without blocks": (
        {"added": [new(0, num_computed=4, blocks=[])]},
        "without blocks",
    ),
    "a block past the last": ({"added": [new(0, blocks=[10])]}, "of 0 … 9"),
    "a negative block": ({"added": [new(0, blocks=[-1])]}, "blocks -1"),
    "more blocks than a sequence has": ({"added": [new(0, blocks=[0] * 6)]}, "6 blocks"),
    "a slot gone that was never there": ({"gone": [2]}, "nothing is in it"),
    "an empty slot that grows": ({"grown": [1, 1]}, "nothing is in it"),
    "half a pair": ({"added": [new(0)], "grown": [0]}, "pairs"),
    "a chunk for an empty slot": ({"chunks": [Chunk(1, 0, 1, False, [])]}, "not prefilling"),
    "a chunk that starts late": (
        {"added": [new(0)], "chunks": [Chunk(0, 1, 2, False, [])]},
        "computed are 0 of 5",
    ),
    "a chunk past the tokens": (
        {"added": [new(0)], "chunks": [Chunk(0, 0, 6, True, [])]},
        "0 … 5",
    ),
    "an empty chunk": ({"added": [new(0)], "chunks": [Chunk(0, 0, 0, False, [])]}, "chunk"),
    "a sample before the end": (
        {"added": [new(0)], "chunks": [Chunk(0, 0, 4, True, [])]},
        "samples",
    ),
    "an end without sample": (
        {"added": [new(0)], "chunks": [Chunk(0, 0, 5, False, [])]},
        "samples",
    ),
    "a chunk without blocks": (
        {"added": [new(0, blocks=[])], "chunks": [Chunk(0, 0, 5, True, [])]},
        "no block for position 4",
    ),
    "too many tokens in a step": (
        {
            "added": [new(0, tokens=ids(*range(33)), prompt_len=33, blocks=[0, 1, 2, 3, 4])],
            "chunks": [Chunk(0, 0, 33, True, [])],
        },
        "max_num_batched_tokens is 32",
    ),
}


@pytest.mark.parametrize("case", list(BAD_FIRST))
def test_a_first_plan_is_refused_with(case: str) -> None:
    parts, message = BAD_FIRST[case]
    executor = NullExecutor(CAPACITY, [])
    with pytest.raises(PlanError, match=message):
        executor.execute(plan(1, **parts))
    executor.execute(plan(2, full=True, added=[new(0)], chunks=[Chunk(0, 0, 5, True, [])]))


def test_gaps_repetitions_and_other_epochs_are_refused() -> None:
    for wrong, message in (
        (plan(3), "plan 3 came, plan 2 was due"),
        (plan(2, epoch=2), "epoch 2"),
        (plan(1, full=False), "plan 1 came"),
    ):
        with pytest.raises(PlanError, match=message):
            decoding_table().apply(wrong)


def test_decoding_without_a_block_or_past_the_longest_sequence_is_refused() -> None:
    table = decoding_table((0,))
    for step in (2, 3, 4):
        run(table, plan(step))
    with pytest.raises(PlanError, match="slot 0: no block for position 8"):
        table.apply(plan(5))
    table = SlotTable(CAPACITY)
    long = new(0, tokens=ids(*range(32)), prompt_len=32, blocks=[0, 1, 2, 3, 4])
    run(table, plan(1, added=[long], chunks=[Chunk(0, 0, 32, True, [])]))
    for step in range(2, 10):
        run(table, plan(step))
    with pytest.raises(PlanError, match="position 40"):
        table.apply(plan(10))


NULL_CAPACITY = EngineSizes(5000, 16, 64, 512, 1024, 1000)


def test_null_tokens_depend_on_seed_choice_and_position_only() -> None:
    samplings = [SlotSampling(1.0, 0, 1.0, seed) for seed in (1, 1, 2, 2)]
    prompts = [[7] * n for n in (1, 30, 100, 600)]
    first = PlanDriver(NullExecutor(NULL_CAPACITY, [3]), 1).run(
        prompts, 40, samplings=samplings, choices=[0, 1, 0, 1]
    )
    prompts.reverse()
    second = PlanDriver(NullExecutor(NULL_CAPACITY, [3]), 2).run(
        prompts, 40, samplings=samplings, choices=[0, 1, 0, 1], preemptions=5, running=2
    )
    assert first == second
    assert len({tuple(output) for output in first}) == 4


def test_the_null_device_says_which_sampling_it_cannot_read() -> None:
    executor = NullExecutor(NULL_CAPACITY, [3])
    added = [new(0), new(1, sampling=b"\xc1")]
    chunks = [Chunk(slot, 0, 5, True, []) for slot in (0, 1)]
    executor.execute(plan(1, added=added, chunks=chunks))
    (failure,) = executor.execute(plan(2)).failures
    assert (failure.row, failure.status) == (1, 500)
    assert executor.execute(plan(3, gone=[1])).failures == []


def test_null_tokens_lie_in_the_vocabulary_and_skip_the_end_tokens() -> None:
    capacity = EngineSizes(1000, 16, 64, 512, 512, 7)
    outputs = PlanDriver(NullExecutor(capacity, [0, 6, 2, 99])).run(
        [[1]] * 8, 200, samplings=[SlotSampling(1.0, 0, 1.0, seed) for seed in range(8)]
    )
    assert {token for output in outputs for token in output} == {1, 3, 4, 5}


def test_null_steps_take_the_time_that_was_asked_for() -> None:
    executor = NullExecutor(NULL_CAPACITY, [], 0.02)
    begun = time.perf_counter()
    result = executor.execute(plan(1))
    assert time.perf_counter() - begun >= 0.02
    assert result.seconds >= 0.02


def test_null_decode_steps_are_cheap() -> None:
    """64 rows cost what one does: no instruction is there for each."""
    one, many = decoding_executor(1), decoding_executor(64)
    for step in range(2, 32):
        of_one = instructions(lambda: one.execute(plan(step)))  # noqa: B023
        of_many = instructions(lambda: many.execute(plan(step)))  # noqa: B023
        assert of_many < of_one + 64
        assert of_many < 1500


def decoding_executor(rows: int) -> NullExecutor:
    executor = NullExecutor(NULL_CAPACITY, [5])
    slots = [new(slot, blocks=[*range(3 * slot, 3 * slot + 3)]) for slot in range(rows)]
    chunks = [Chunk(slot, 0, 5, True, []) for slot in range(rows)]
    executor.execute(plan(1, added=slots, chunks=chunks))
    return executor
