"""Prefill steps of an executor on a Hopper GPU: graphs and single launches, either kernel."""

from __future__ import annotations

import pytest
import torch
import triton
from support.worker.sharp_model import CONFIG, executor_of, sharp_weights

from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.gpu.executor import GpuExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
GREEDY = SlotSampling(0.0, 0, 1.0, 0)
CHUNKS = [100, 2300, 400, 1, 17]
"""Tokens of consecutive chunks: the second is more than graphs are made for."""


def logits_of(executor: GpuExecutor) -> list[torch.Tensor]:
    """The last row's logits, [vocab], after each of ``CHUNKS``."""
    total = sum(CHUNKS)
    tokens = (torch.arange(total, dtype=torch.int32) * 37 % CONFIG.vocab_size).numpy()
    found = []
    for end in range(1, len(CHUNKS) + 1):
        known = sum(CHUNKS[:end])
        blocks = list(reversed(range(-(-known // 16))))
        new = NewSlot(0, tokens[:known].tobytes(), known, 0, blocks, GREEDY.packed())
        start, new_slots = 0, [new]
        for index, count in enumerate(CHUNKS[:end]):
            last = index == end - 1
            chunk = Chunk(0, start, count, last, [])
            plan = StepPlan(1, index, not index, [], new_slots, [], [chunk])
            if last:
                found.append(executor.logits(plan)[0].clone())
            else:
                executor.execute(plan)
            start, new_slots = start + count, []
        executor.reset()
    return found


def test_steps_of_all_sizes_compile_nothing_and_equal_those_of_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = sharp_weights()
    executor = executor_of(weights, 8)
    assert executor.decoder.attention.prefill.summary == "Gluon kernel for Hopper"
    compiled: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(found)
        )
        found = logits_of(executor)
    assert not compiled
    with monkeypatch.context() as patch:
        # Their kernel is for more rows than such a small model has.
        patch.setattr("penstock.kernels.gpu.gated_linear_hopper.pays", lambda *sizes: True)
        gated = logits_of(executor_of(weights, 8, warm=False))
    monkeypatch.setattr("penstock.services.worker.gpu.kernel_choice.HOPPER", (0, 0))
    other = executor_of(weights, 8)
    assert other.decoder.attention.prefill.name == "Triton kernel"
    for count, *ours, theirs in zip(CHUNKS, found, gated, logits_of(other), strict=True):
        for logits, products in zip(ours, ("as chosen", "gated in one kernel"), strict=True):
            difference = (logits.float() - theirs.float()).norm() / theirs.float().norm()
            assert difference < 5e-2, f"after a chunk of {count}, products {products}"


LENGTHS = [40, 300, 70, 100, 131]
BEGUN = 3
"""The number of them that decode while the others begin."""


def new_slot(slot: int, number: int) -> tuple[NewSlot, Chunk]:
    """A prompt of one of ``LENGTHS``, computed in one chunk."""
    count = LENGTHS[number]
    tokens = (torch.arange(count, dtype=torch.int32) * 37 + 11 * number) % CONFIG.vocab_size
    blocks = list(range(number * 20, number * 20 + 20))
    new = NewSlot(slot, tokens.numpy().tobytes(), count, 0, blocks, GREEDY.packed())
    return new, Chunk(slot, 0, count, True, [])


def logits_after(executor: GpuExecutor, *steps: list[tuple[NewSlot, Chunk]]) -> torch.Tensor:
    """All rows' logits after each of some steps, [rows of all, vocab]."""
    found = []
    for number, begun in enumerate(steps):
        added, chunks = [new for new, _ in begun], [chunk for _, chunk in begun]
        plan = StepPlan(1, number + 1, not number, [], added, [], chunks)
        found.append(executor.logits(plan).float().clone())
    executor.reset()
    return torch.cat(found)


def test_sampled_rows_of_a_mixed_step_have_the_logits_of_each_sequence_alone() -> None:
    executor = executor_of(sharp_weights(), 8)
    begun, others = range(BEGUN), range(BEGUN, len(LENGTHS))
    found = logits_after(
        executor, [new_slot(i, i) for i in begun], [new_slot(i, i) for i in others]
    )
    alone = [logits_after(executor, [new_slot(0, i)], []) for i in range(len(LENGTHS))]
    wanted = [
        *(alone[i][0] for i in begun), *(alone[i][1] for i in begun), *(alone[i][0] for i in others)
    ]  # fmt: skip
    for row, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert (ours - theirs).norm() / theirs.norm() < 5e-2, f"row {row}"
