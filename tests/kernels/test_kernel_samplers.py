"""Samplers: each equals its reference, alone and in any order; draws follow the exact
distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.sampler_cases import CASES, reference, rows, shares

from penstock.kernels.draw_keys import draw_keys
from penstock.kernels.sampling import (
    NOT_FINITE,
    NOTHING_LEFT,
    SamplerStages,
    SamplingRows,
    Stage,
    TokenBiases,
    choose,
)
from penstock.kernels.sampling.samplers import SAMPLERS
from penstock.kernels.sampling.samplers.mirostat import bound_after, next_bound
from penstock.kernels.sampling.samplers.xtc import coin
from penstock.kernels.sampling.stages import through_stages

GREEDY = 1e-5
VOCAB = 24
COMBINATIONS = [
    [Stage("typical_p", [0.8]), Stage("temperature", [1.7]), Stage("top_k", [6])],
    [Stage("temperature", [1.7]), Stage("typical_p", [0.8]), Stage("top_k", [6])],
    [Stage("top_k", [6]), Stage("smoothing", [0.2, 1.0]), Stage("typical_p", [0.8])],
    [Stage("xtc", [0.08, 0.5]), Stage("skew", [0.5]), Stage("min_p", [0.1])],
    [Stage("min_p", [0.1]), Stage("skew", [0.5]), Stage("xtc", [0.08, 0.5])],
    [Stage("tfs", [0.9]), Stage("dynamic_temperature", [0.5, 2.0, 1.0]), Stage("top_p", [0.9])],
    [Stage("nsigma", [1.5]), Stage("mirostat", [2.0, 0.1]), Stage("eta_cutoff", [0.02])],
    [Stage("top_a", [0.2]), Stage("epsilon_cutoff", [0.02]), Stage("temperature", [2.5])],
]


def keys_for(count: int, seed: int = 1) -> np.ndarray:
    zeros = np.zeros(count, np.uint64)
    return draw_keys(zeros + np.uint64(seed), zeros, np.arange(count, dtype=np.uint64))


def asked_rows(count: int, keys: np.ndarray, temperature: float = 1.0) -> SamplingRows:
    return SamplingRows(
        np.full(count, temperature, np.float32),
        np.zeros(count, np.int64),
        np.ones(count, np.float32),
        keys,
    )


def draws(z: np.ndarray, stages: list[Stage], count: int, bound: float = 6.0) -> np.ndarray:
    """Tokens of ``count`` output positions that have the same logits."""
    keys = keys_for(count)
    step = SamplerStages(np.arange(count), [stages] * count, keys, [bound] * count)
    logits = torch.from_numpy(z).expand(count, -1)
    return choose(logits, asked_rows(count, keys), GREEDY, [step]).tokens.numpy()


def exact(z: np.ndarray, stages: list[Stage], count: int, bound: float = 6.0) -> np.ndarray:
    """How often each token is drawn at these positions, by the references: XTC's coin differs."""
    keys = keys_for(count).tolist()
    threshold = next((stage.values[1] for stage in stages if stage.sampler == "xtc"), 0.0)
    heads = [key for key in keys if coin(key) < threshold]
    tails = [key for key in keys if coin(key) >= threshold]
    return sum(
        len(same) * shares(reference(z, stages, same[0], bound)) for same in (heads, tails) if same
    )


def in_short(every: list[list[Stage]]) -> list[Any]:
    """Each third one in the quick run: whichever stages leave the distribution, one draw follows
    it."""
    return [
        pytest.param(stages, marks=pytest.mark.slow if place % 3 else ())
        for place, stages in enumerate(every)
    ]


@pytest.mark.parametrize("stage", CASES, ids=str)
@pytest.mark.parametrize("vocab", [24, 1500])
def test_a_sampler_equals_its_reference(stage: Stage, vocab: int) -> None:
    key = keys_for(1).tolist()[0]
    for name, row in rows(vocab).items():
        wanted = reference(row, [stage], key)
        got = through_stages(torch.from_numpy(row).double(), [stage], key, 6.0).numpy()
        assert not np.isnan(got).any(), name
        assert np.isfinite(got.max()), name
        assert (np.isfinite(got) == np.isfinite(wanted)).all(), name
        np.testing.assert_allclose(shares(got), shares(wanted), rtol=1e-9, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("stages", in_short([[stage] for stage in CASES]), ids=str)
def test_draws_with_a_sampler_follow_the_exact_distribution(stages: list[Stage]) -> None:
    follow_the_exact_distribution(stages)


@pytest.mark.parametrize("stages", in_short(COMBINATIONS), ids=str)
def test_draws_with_three_samplers_follow_the_exact_distribution(stages: list[Stage]) -> None:
    follow_the_exact_distribution(stages)


def follow_the_exact_distribution(stages: list[Stage]) -> None:
    """Chi-square; the limit is 6 standard deviations above the mean."""
    z, count = rows(VOCAB, 3)["usual"] / np.float32(1.5), 700
    got = np.bincount(draws(z, stages, count, 4.0), minlength=VOCAB)
    wanted = exact(z, stages, count, 4.0)
    support = wanted > 0
    assert got[~support].sum() == 0
    rare = support & (wanted < 5)
    seen = np.append(got[support & ~rare], got[rare].sum())
    hoped = np.append(wanted[support & ~rare], wanted[rare].sum() + 1e-9)
    freedom = len(seen) - 1
    statistic = float(((seen - hoped) ** 2 / np.maximum(hoped, 1.0)).sum())
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 6


def test_the_order_of_samplers_matters_as_the_references_say() -> None:
    z = rows(VOCAB, 3)["usual"]
    first, second = (shares(reference(z, stages)) for stages in COMBINATIONS[:2])
    assert np.abs(first - second).max() > 0.05


def test_rows_of_all_samplers_and_of_none_draw_as_each_does_alone() -> None:
    many = [*([stage] for stage in CASES), *COMBINATIONS]
    count = 2 * len(many)
    keys = keys_for(count, 5)
    logits = torch.from_numpy(np.stack([rows(700, seed)["usual"] for seed in range(count)]))
    logits[:, ::7] = logits[:, ::7].round()
    asking = np.arange(1, count, 2)
    step = SamplerStages(asking, many, keys[asking], [5.0] * len(many))
    wanted = asked_rows(count, keys)
    together = choose(logits, wanted, GREEDY, [step])
    assert not together.bad.any()
    plain = choose(logits, wanted, GREEDY).tokens
    assert torch.equal(together.tokens[::2], plain[::2])
    assert not torch.equal(together.tokens[1::2], plain[1::2])
    for index, row in enumerate(asking.tolist()):
        alone = SamplerStages(np.array([0]), [many[index]], keys[[row]], [5.0])
        found = choose(logits[[row]], wanted.take(np.array([row])), GREEDY, [alone])
        assert found.tokens[0] == together.tokens[row]


def test_a_row_that_is_not_finite_or_has_nothing_left_disturbs_nobody() -> None:
    keys = keys_for(5)
    logits = torch.from_numpy(np.stack([rows(64, seed)["usual"] for seed in range(5)]))
    sick = logits.clone()
    sick[1, 3], sick[2, 9] = torch.nan, torch.inf
    every_token = np.arange(64)
    bans = TokenBiases(np.full(64, 3), every_token, np.full(64, -np.inf, np.float32))
    for stages in ([stage] for stage in CASES):
        step = SamplerStages(np.arange(5), [stages] * 5, keys, [6.0] * 5)
        good = choose(logits, asked_rows(5, keys), GREEDY, [step])
        found = choose(sick, asked_rows(5, keys), GREEDY, [bans, step])
        assert found.bad.tolist() == [0, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, 0]
        assert [found.tokens[row] == good.tokens[row] for row in (0, 4)] == [True, True]


def test_every_coin_of_xtc_is_a_draw_of_its_own() -> None:
    """Uniform, and independent of the noise of the draw beside it."""
    tosses = np.array([coin(key) for key in keys_for(1500).tolist()])
    assert abs(tosses.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(tosses))
    z = np.zeros(8, np.float32)
    tokens = draws(z, [Stage("temperature", [1.0])], 1500)
    for token in range(8):
        assert abs(tosses[tokens == token].mean() - 0.5) < 5 * math.sqrt(8 / 12 / len(tosses))


def test_mirostat_keeps_the_surprise_of_a_text_near_its_target() -> None:
    """Unsteered it would be about 6 bits."""
    rng, tau, eta, found = np.random.default_rng(2), 3.0, 0.2, []
    bound = bound_after(tau, eta, [])
    assert bound == 2 * tau
    for position in range(400):
        z = (2.5 * rng.standard_normal(900)).astype(np.float32)
        kept = shares(reference(z, [Stage("mirostat", [tau, eta])], 0, bound))
        token = int(rng.choice(900, p=kept))
        logprob = float(np.log(shares(z.astype(np.float64)))[token])
        bound = next_bound(bound, tau, eta, logprob)
        found.append(logprob)
        if position == 200:
            half = bound_after(tau, eta, found)
            assert half == bound
    assert abs(-np.mean(found[50:]) / math.log(2) - tau) < 0.2


def test_samplers_are_numbered_without_gaps() -> None:
    assert sorted(one.number for one in SAMPLERS.values()) == list(range(len(SAMPLERS)))
