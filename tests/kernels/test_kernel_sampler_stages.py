"""The kernels of samplers against the references in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.kernels.sampler_cases import CASES, reference, rows, shares
from support.kernels.staged_rows import StagedRows
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU

from penstock.kernels.draw_keys import draw_keys
from penstock.kernels.gpu.sampler_memory import MOST_STAGES, STAGE_NUMBERS
from penstock.kernels.gpu.surprise import surprise
from penstock.kernels.sampling import Stage
from penstock.kernels.sampling.samplers import SAMPLERS

VOCABULARIES = [5, 1000, 32_000, 151_936] if ON_GPU else [5, 700]
CLOSE = 2e-5
"""Relative: sums are fp32."""
MIXED = [
    [Stage("typical_p", [0.8]), Stage("temperature", [1.7]), Stage("top_k", [6])],
    [Stage("tfs", [0.95]), Stage("dynamic_temperature", [0.5, 2.0, 1.0]), Stage("top_p", [0.9])],
    [Stage("temperature", [0.7]), Stage("tfs", [0.97]), Stage("skew", [0.4])],
    [],
    [Stage("min_p", [0.02]), Stage("xtc", [0.03, 0.9]), Stage("temperature", [1.4])],
    [Stage("nsigma", [2.0]), Stage("smoothing", [0.2, 1.2]), Stage("mirostat", [3.0, 0.1])],
    [Stage("eta_cutoff", [0.01]), Stage("epsilon_cutoff", [0.01]), Stage("top_a", [0.05])],
]


def keys_for(count: int) -> list[int]:
    """Of slots with seed 1 at the output position of their row."""
    zeros = np.zeros(count, np.uint64)
    return draw_keys(zeros + np.uint64(1), zeros, np.arange(count, dtype=np.uint64)).tolist()


def agrees(got: np.ndarray, wanted: np.ndarray, what: object) -> None:
    """Equal but for rounding: a token at an edge, or one that is next to never drawn, may be kept
    or not."""
    assert not np.isnan(got).any(), what
    differs = np.isfinite(got) != np.isfinite(wanted)
    if differs.any():
        lost = max(shares(z.astype(np.float64))[differs].sum() for z in (got, wanted))
        assert lost < 1e-6 or (differs.sum() == 1 and lost < 0.02), what
        return
    np.testing.assert_allclose(
        shares(got.astype(np.float64)), shares(wanted), rtol=50 * CLOSE, atol=CLOSE / 10,
        err_msg=str(what),
    )  # fmt: skip


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_sampler_equals_its_reference_on_hard_rows(vocab: int) -> None:
    hard = rows(vocab)
    for name, row in hard.items():
        keys = keys_for(len(CASES))
        found = StagedRows([[stage] for stage in CASES], vocab).run(np.stack([row] * len(CASES)))
        for got, stage, key in zip(found, CASES, keys, strict=True):
            agrees(got, reference(row, [stage], key), (stage, name))


@pytest.mark.parametrize("vocab", VOCABULARIES[1:])
def test_mixed_rows_go_through_their_stages_in_their_own_order(vocab: int) -> None:
    logits = np.stack([rows(vocab, seed)["usual"] for seed in range(len(MIXED))])
    found = StagedRows(MIXED, vocab).run(logits)
    for row, (stages, key) in enumerate(zip(MIXED, keys_for(len(MIXED)), strict=True)):
        agrees(found[row], reference(logits[row], stages, key), stages)
        if not stages:
            assert (found[row] == logits[row]).all()


def test_a_row_that_is_not_finite_ends_and_disturbs_nobody() -> None:
    vocab, stages = 300, [[stage] for stage in CASES]
    logits = np.stack([rows(vocab, 4)["usual"]] * len(stages))
    good = StagedRows(stages, vocab).run(logits)
    for bad in (math.nan, math.inf, -math.inf):
        for which in (0, 1):
            sick = logits.copy()
            sick[which::2, :] = np.where(np.arange(vocab) % 3 == 0, bad, sick[which::2, :])
            if bad == -math.inf:
                sick[which::2, :] = bad
            found = StagedRows(stages, vocab).run(sick)
            assert np.array_equal(found[1 - which :: 2], good[1 - which :: 2])


def test_there_is_room_for_every_sampler_and_its_numbers() -> None:
    assert len(SAMPLERS) <= MOST_STAGES
    assert MOST_STAGES & (MOST_STAGES - 1) == 0
    assert max(len(stage.values) for stage in CASES) <= STAGE_NUMBERS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_surprise_of_tokens_is_their_logprob_in_bits(dtype: torch.dtype) -> None:
    vocab = 40_000 if ON_GPU else 700
    logits = torch.from_numpy(np.stack([rows(vocab, seed)["usual"] for seed in range(5)]))
    logits = logits.to(dtype).to(DEVICE)
    which, tokens = [4, 0, 2], [7, 0, vocab - 1]
    found = torch.empty(3, device=DEVICE)
    surprise(
        logits, torch.tensor(which, dtype=torch.int32, device=DEVICE),
        torch.tensor(tokens, dtype=torch.int32, device=DEVICE), found,
    )  # fmt: skip
    wanted = -logits.double().log_softmax(-1)[which, tokens] / math.log(2)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
