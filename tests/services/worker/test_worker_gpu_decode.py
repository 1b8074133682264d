"""Decode rows of an executor on a Hopper GPU, alone and beside chunks: either kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
import triton
from support.worker.sharp_model import CONFIG, executor_of, sharp_weights

from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.gpu.compressed_layers import compress_all
from penstock.services.worker.gpu.executor import GpuExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
GREEDY = SlotSampling(0.0, 0, 1.0, 0)
LENGTHS = [1, 17, 300, 900, 31, 32, 33, 500, 64, 5, 1000, 128]
"""Tokens of each slot's prompt."""
LATE = 2320
"""Tokens of the prompt that comes while others decode."""
BLOCKS = 65
"""KV blocks of each of ``LENGTHS``."""
COMMON = 640
OWN = [10, 1, 33, 100, 64, 5, 17, 31, 120, 3, 90, 2]
"""Tokens of prompts behind those that they have in common."""


def new_slot(slot: int, count: int, blocks: range) -> NewSlot:
    tokens = (torch.arange(count, dtype=torch.int32) * 37 + slot) % CONFIG.vocab_size
    return NewSlot(slot, tokens.numpy().tobytes(), count, 0, list(blocks)[::-1], GREEDY.packed())


def plans() -> Iterator[StepPlan]:
    """Prompts; decode; decode beside a few rows and beside more than graphs are made for; decode of
    fewer and fewer rows."""
    last = len(LENGTHS) - 1
    added = [
        new_slot(slot, count, range(slot * BLOCKS, (slot + 1) * BLOCKS))
        for slot, count in enumerate(LENGTHS[:last])
    ]
    chunks = [Chunk(slot, 0, count, True, []) for slot, count in enumerate(LENGTHS[:last])]
    yield StepPlan(1, 1, True, [], added, [], chunks)
    yield StepPlan(1, 2, False, [], [], [], [])
    yield StepPlan(1, 3, False, [], [], [], [])
    first, end = last * BLOCKS, last * BLOCKS + 80
    late = new_slot(last, LATE, range(first, end))
    room = list(range(end, end + 70))
    yield StepPlan(1, 4, False, [], [late], [], [Chunk(last, 0, 20, False, [])])
    yield StepPlan(1, 5, False, [], [], [], [Chunk(last, 20, LATE - 20, True, room)])
    gone: list[list[int]] = [[], [0, 1, 2, 3, 11], [4, 5, 6], [7, 8], [10], []]
    for step, leaving in enumerate(gone, 6):
        yield StepPlan(1, step, False, leaving, [], [], [])


def sharing_plans() -> Iterator[StepPlan]:
    """A prompt; others that begin with its first ``COMMON`` tokens, in the same blocks; decode."""
    common = list(range(COMMON // 16))
    added = []
    for slot, own in enumerate(OWN):
        tokens = torch.arange(COMMON + own, dtype=torch.int32) * 37
        tokens[COMMON:] += slot
        first = len(common) + 8 * slot
        blocks = [*common, *range(first, first + 8)]
        ids = (tokens % CONFIG.vocab_size).numpy().tobytes()
        computed = COMMON if slot else 0
        added.append(NewSlot(slot, ids, COMMON + own, computed, blocks, GREEDY.packed()))
    chunks = [Chunk(slot, COMMON, own, True, []) for slot, own in enumerate(OWN)]
    yield StepPlan(1, 1, True, [], added[:1], [], [Chunk(0, 0, COMMON + OWN[0], True, [])])
    yield StepPlan(1, 2, False, [], added[1:], [], chunks[1:])
    for step in (3, 4, 5):
        yield StepPlan(1, step, False, [], [], [], [])


def logits_of(executor: GpuExecutor, plans: Iterable[StepPlan]) -> list[torch.Tensor]:
    """Logits [rows, vocab] of every step, whose last tokens are the same whatever was sampled."""
    found = []
    last_token = executor.decoder.state.last_token
    for plan in plans:
        tokens = torch.arange(len(last_token), device="cuda") * 53 + 101 * plan.step
        with torch.inference_mode():
            last_token.copy_(tokens % CONFIG.vocab_size)
        found.append(executor.logits(plan).clone())
    return found


def test_steps_compile_nothing_and_equal_those_of_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = sharp_weights()
    executor = executor_of(weights, len(LENGTHS))
    assert "; decode attention by the Gluon kernel for Hopper;" in executor.summary
    compiled: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(found)
        )
        found = logits_of(executor, plans())
    assert not compiled
    eager = logits_of(executor_of(weights, len(LENGTHS), warm=False), plans())
    compression = compress_all(weights)
    compressed = executor_of(weights, len(LENGTHS), compression=compression)
    smaller = logits_of(compressed, plans())
    assert compressed.decoder.products.kernels is not None
    assert compressed.decoder.products.kernels.head is not None
    monkeypatch.setattr("penstock.services.worker.gpu.kernel_choice.HOPPER", (0, 0))
    other = executor_of(weights, len(LENGTHS))
    assert other.decoder.attention.decode.name == "Triton kernel"
    wanted = logits_of(other, plans())
    assert [len(rows) for rows in found] == [11, 11, 11, 11, 12, 12, 7, 4, 2, 1, 1]
    assert_alike(wanted, graphs=found, launches=eager, compressed=smaller)


def test_rows_that_share_a_prefix_equal_those_of_the_triton_kernels_and_of_rows_that_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = sharp_weights()
    alone = executor_of(weights, len(OWN))
    apart = logits_of(alone, sharing_plans())
    assert not alone.shares_a_prefix, "too little to share"
    monkeypatch.setattr("penstock.services.worker.gpu.shared_rows.LEAST_SAVED", 1)
    executor = executor_of(weights, len(OWN))
    assert "; that over shared prefixes by the Gluon kernel for Hopper;" in executor.summary
    found = logits_of(executor, sharing_plans())
    assert executor.shares_a_prefix
    eager = logits_of(executor_of(weights, len(OWN), warm=False), sharing_plans())
    monkeypatch.setattr("penstock.services.worker.gpu.kernel_choice.HOPPER", (0, 0))
    wanted = logits_of(executor_of(weights, len(OWN)), sharing_plans())
    assert_alike(wanted, graphs=found, launches=eager, apart=apart)


def assert_alike(wanted: list[torch.Tensor], **found: list[torch.Tensor]) -> None:
    """The same logits in each step, but for rounding."""
    for by, steps in found.items():
        for step, (ours, theirs) in enumerate(zip(steps, wanted, strict=True), 1):
            difference = (ours.float() - theirs.float()).norm(dim=-1)
            assert (difference < 5e-2 * theirs.float().norm(dim=-1)).all(), f"step {step}, {by}"
