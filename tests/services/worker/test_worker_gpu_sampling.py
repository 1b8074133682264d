"""Rows that ask for more than a temperature, on a GPU: nothing is compiled and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
import triton
from support.worker.asked_slots import EVERY_KIND, asking, biased, ids
from support.worker.sharp_model import CONFIG as SMALL

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.grammar.compiler import make_tokenizer as make_vocabulary
from penstock.protocol.grammar.request import Grammar
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.models.dense_form import allocate_dense

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SLOTS = 96
CONFIG = msgspec.structs.replace(SMALL, vocab_size=50_000)
"""It has tokens enough that the draw of all slots is cut in other places than that of one."""
KINDS = [
    *EVERY_KIND,
    SlotSampling(0.8, 20, 0.9, 5),
    asking(bad_words=[ids(5, 6), ids(9)]),
    asking(0.9, min_tokens=40, ends=ids(3, 4), **biased(t7=2.0)),
    asking(0.9, banned=ids(3, 4), banned_until=2),
    SlotSampling(0.0, 0, 1.0, 0),
    SlotSampling(0.0, 0, 1.0, 0, logprobs=0),
    SlotSampling(0.7, 30, 0.9, 0, logprobs=20),
    asking(0.7, grammar=Grammar("regex", "[a-z ]{1,200}")),
]


def plans() -> Iterator[StepPlan]:
    """One row, then all, then fewer and fewer."""
    added = []
    for slot in range(SLOTS):
        tokens = ((np.arange(20) * 37 + slot) % CONFIG.vocab_size).astype("<i4").tobytes()
        blocks = [4 * slot, 4 * slot + 1, 4 * slot + 2, 4 * slot + 3]
        prompt_logprobs = 3 if slot % 7 == 0 else None
        kind = KINDS[slot % len(KINDS)]
        added.append(NewSlot(slot, tokens, 20, 0, blocks, kind.packed(), 0, prompt_logprobs))
    chunks = [Chunk(slot, 0, 20, True, []) for slot in range(SLOTS)]
    yield StepPlan(1, 1, True, [], added[:1], [], chunks[:1])
    yield StepPlan(1, 2, False, [], added[1:], [], chunks[1:])
    gone: list[list[int]] = [[], [], [*range(40, SLOTS)], [*range(6, 40)], [1, 2, 3], []]
    for step, leaving in enumerate(gone, 3):
        yield StepPlan(1, step, False, leaving, [], [], [])


def test_steps_with_rows_of_every_kind_compile_nothing_and_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = allocate_dense(CONFIG, torch.bfloat16, torch.device("cuda"))
    for tensor in (weights.embedding, weights.lm_head.weight):
        tensor.normal_(0.0, 0.1)
    for layer in weights.layers:
        for linear in layer.linears:
            linear.weight.normal_(0.0, 0.05)
        for norm in (layer.input_norm, layer.post_norm, layer.query_norm, layer.key_norm):
            if norm is not None:
                norm.fill_(1.0)
    weights.norm.fill_(1.0)
    capacity = EngineSizes(900, 16, SLOTS, 4096, 4096, CONFIG.vocab_size)
    executor = dense_executor(CONFIG, weights, capacity)
    executor.grammars.serve(
        lambda: make_vocabulary(make_tokenizer(CONFIG.vocab_size).to_str(), CONFIG.vocab_size, [2]),
        patience=20.0,
    )
    executor.warm_up()
    compiled: list[object] = []
    counts = []
    with monkeypatch.context() as patch:
        patch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(found)
        )
        for plan in plans():
            torch.cuda.set_sync_debug_mode("error")
            try:
                executor.launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            result = executor.finished(wait=True)
            assert result is not None
            assert not result.bad_rows and not result.failures
            assert plan.step > 1 or len(result.prompt_logprobs) == 1
            tokens = np.frombuffer(result.tokens, "<i4")
            assert tokens.min() >= 0 and tokens.max() < CONFIG.vocab_size
            counts.append(len(tokens))
    assert counts == [1, SLOTS, SLOTS, SLOTS, 40, 6, 3, 3]
    assert not compiled
