"""Prefill steps of an executor on a Hopper GPU: graphs and single launches, either kernel."""

from __future__ import annotations

import pytest
import torch
import triton

from penstock.kernels.rotary import RopeParameters
from penstock.protocol.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.executor import ExecutorCapacity
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.models.decoder import (
    DecoderConfig,
    DecoderWeights,
    allocate_weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
GREEDY = SlotSampling(0.0, 0, 1.0, 0, 0)
CHUNKS = [100, 2300, 400, 1, 17]
"""Tokens of consecutive chunks: the second is more than graphs are made for."""
CONFIG = DecoderConfig(
    512, 512, 2, 8, 2, 128, 512, 1e-6, RopeParameters(1e4), False, qk_norm=True,
)  # fmt: skip


def sharp_weights() -> DecoderWeights:
    """Random weights by which each query attends to few keys, so that wrong ones show."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = allocate_weights(CONFIG, torch.bfloat16, torch.device("cuda"))

    def fill(tensor: torch.Tensor | None, value: float) -> None:
        if tensor is None:
            return
        if tensor.dim() == 1:
            tensor.fill_(value)
        else:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)

    for layer in weights.layers:
        for tensor in (layer.qkv, layer.output, layer.gate_up, layer.down):
            fill(tensor, 1.0)
        for tensor in (layer.input_norm, layer.post_norm):
            fill(tensor, 1.0)
        for tensor in (layer.query_norm, layer.key_norm):
            fill(tensor, 1.7)
    weights.embedding.normal_(0.0, 1.0, generator=generator)
    fill(weights.lm_head, 1.0)
    fill(weights.norm, 1.0)
    return weights


def ready_executor(weights: DecoderWeights) -> GpuExecutor:
    capacity = ExecutorCapacity(400, 16, 8, 4096, 4096, CONFIG.vocab_size)
    executor = GpuExecutor(CONFIG, weights, capacity)
    executor.warm_up()
    return executor


def logits_of(executor: GpuExecutor) -> list[torch.Tensor]:
    """The last row's logits, [vocab], after each of ``CHUNKS``."""
    total = sum(CHUNKS)
    tokens = (torch.arange(total, dtype=torch.int32) * 37 % CONFIG.vocab_size).numpy()
    found = []
    for end in range(1, len(CHUNKS) + 1):
        known = sum(CHUNKS[:end])
        blocks = list(reversed(range(-(-known // 16))))
        new = NewSlot(0, tokens[:known].tobytes(), known, 0, blocks, GREEDY)
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
    executor = ready_executor(weights)
    assert executor.summary == "prefill attention by the Gluon kernel for Hopper"
    compiled: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(found)
        )
        found = logits_of(executor)
    assert not compiled
    monkeypatch.setattr("penstock.services.worker.gpu.prefill_choice.HOPPER", (0, 0))
    other = ready_executor(weights)
    assert "Triton kernel" in other.summary
    for count, ours, theirs in zip(CHUNKS, found, logits_of(other), strict=True):
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert difference < 5e-2, f"after a chunk of {count}"
