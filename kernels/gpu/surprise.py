"""How surprising tokens were to the model: -log2 of their probabilities.

Mirostat learns from it (``penstock.kernels.sampling.samplers.mirostat``); the reference is
``penstock.kernels.sampling.stages.model_logprob``. One program a row, in two passes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early

_BLOCK = 4096
"""Logits that a pass reads at once."""
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _surprise_kernel(logits, which, tokens, out, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin_early(EARLY)
    index = tl.program_id(0)
    row = logits + tl.load(which + index).to(tl.int64) * vocab
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        best = tl.maximum(best, z.to(tl.float32))
    top = tl.max(best, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = tl.load(row + ids, mask=ids < vocab, other=float("-inf"))
        total += tl.exp(z.to(tl.float32) - top)
    chosen = tl.load(row + tl.load(tokens + index)).to(tl.float32)
    tl.store(out + index, (tl.log(tl.sum(total, 0)) - (chosen - top)) / _LN2)


def surprise(logits: Tensor, which: Tensor, tokens: Tensor, out: Tensor) -> None:
    """-log2 of the probabilities of tokens in rows of logits. logits: [N, V], as the model gave
    them; which, tokens: [n] int32; out: [n] fp32."""
    vocab = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _surprise_kernel[(len(which),)](
        logits, which, tokens, out, vocab, block, EARLY, num_warps=8, launch_pdl=EARLY
    )
