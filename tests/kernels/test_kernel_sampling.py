"""Sampling: supports, distributions, reproducibility and independence of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.kernels.draw_keys import draw_keys, key_words
from penstock.kernels.sampling import CANDIDATES, SamplingRows, bad_rows, exponential, sample

GREEDY = 1e-5


def keys_for(rows: int, seed: int = 1) -> np.ndarray:
    zeros = np.zeros(rows, np.uint64)
    return draw_keys(zeros + np.uint64(seed), zeros, np.arange(rows, dtype=np.uint64))


def rows_of(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 1
) -> SamplingRows:
    return SamplingRows(
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int64),
        np.full(count, top_p, np.float32),
        keys_for(count, seed),
    )


def draws(logits: torch.Tensor, count: int, **params: float) -> np.ndarray:
    """``count`` draws from one row of logits, each at another output position."""
    rows = rows_of(count, **params)  # type: ignore[arg-type]
    return sample(logits.expand(count, -1), rows, GREEDY).numpy()


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The exact distribution in float64: top-k, then top-p over what is left, by the definition."""
    probabilities = np.exp(logits / temperature - np.max(logits / temperature))
    order = np.argsort(-probabilities, kind="stable")
    if top_k > 0:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    total, keep = 0.0, np.zeros(len(logits), bool)
    for token in order:
        keep[token] = True
        total += probabilities[token]
        if total >= top_p:
            break
    probabilities[~keep] = 0
    return probabilities / probabilities.sum()


def test_greedy_rows_take_the_highest_logit() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, rows_of(5, 0.0), GREEDY), logits.argmax(-1))
    assert torch.equal(sample(logits, rows_of(5, 9e-6, 3, 0.5), GREEDY), logits.argmax(-1))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, -1, 1.0),
        (1.0, 4, 1.0),
        (1.0, 0, 0.7),
        (0.8, 8, 0.9),
        (1.5, 500, 0.5),
    ],
)
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square over 20,000 draws; the limit is 6 standard deviations above the mean."""
    logits = 1.5 * torch.randn(16, generator=torch.Generator().manual_seed(5))
    count = 20_000
    got = np.bincount(
        draws(logits, count, temperature=temperature, top_k=top_k, top_p=top_p), minlength=16
    )
    exact = kept(logits.double().numpy(), temperature, top_k, top_p) * count
    support = exact > 0
    assert got[~support].sum() == 0
    freedom = int(support.sum()) - 1
    statistic = float((((got - exact) ** 2)[support] / exact[support]).sum())
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("vocab", [CANDIDATES - 1, CANDIDATES, 5 * CANDIDATES])
@pytest.mark.parametrize(
    ("scale", "top_k", "top_p"),
    [(0.01, 0, 0.6), (3.0, 0, 0.6), (1.0, 50, 1.0), (0.01, 2000, 0.9), (1.0, 50, 0.3)],
)
def test_support_is_exact_on_large_vocabularies(
    vocab: int, scale: float, top_k: int, top_p: float
) -> None:
    """Flat rows need more than the candidates, steep ones do not; both give the exact set."""
    logits = scale * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    allowed = kept(logits.double().numpy(), 1.0, min(top_k, vocab), top_p) > 0
    got = draws(logits, 300, top_k=top_k, top_p=top_p)
    # The last token kept may differ where float32 and float64 round the sum differently.
    edge = np.sort(logits.numpy()[allowed])[0]
    assert (logits.numpy()[got] >= edge - 1e-5).all()
    if allowed.sum() > 600:
        assert len(set(got.tolist())) > 150


def test_top_k_one_and_top_p_zero_are_greedy() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(3))
    for rows in (rows_of(6, 1.0, 1), rows_of(6, 1.0, 0, 0.0), rows_of(6, 50.0, 40, 1e-9)):
        assert torch.equal(sample(logits, rows, GREEDY), logits.argmax(-1))


def test_a_row_draws_the_same_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(11)
    vocab, count = 2500, 24
    logits = torch.randn(count, vocab, generator=generator)
    rng = np.random.default_rng(4)
    rows = SamplingRows(
        rng.choice([0.0, 0.3, 1.0, 1.7], count).astype(np.float32),
        rng.choice([0, 1, 40, 2000], count),
        rng.choice([0.2, 0.95, 1.0], count).astype(np.float32),
        keys_for(count),
    )
    together = sample(logits, rows, GREEDY)
    for row in range(count):
        index = np.array([row])
        assert sample(logits[row : row + 1], rows.take(index), GREEDY)[0] == together[row]
    order = rng.permutation(count)
    assert torch.equal(sample(logits[order], rows.take(order), GREEDY), together[order])


def test_a_row_that_is_not_finite_is_reported_and_disturbs_nobody() -> None:
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(2))
    sick = logits.clone()
    sick[1, 7], sick[2, 0], sick[4, 9] = torch.nan, torch.inf, -torch.inf
    assert bad_rows(sick).tolist() == [False, True, True, False, True, False]
    assert not bad_rows(logits).any()
    for rows in (rows_of(6, 0.0), rows_of(6), rows_of(6, 1.0, 20), rows_of(6, 1.0, 0, 0.9)):
        good, got = sample(logits, rows, GREEDY), sample(sick, rows, GREEDY)
        assert [good[i] == got[i] for i in (0, 3, 5)] == [True] * 3
        assert int(got.min()) >= 0
        assert int(got.max()) < 1500


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def test_the_hash_equals_its_definition_in_unbounded_integers() -> None:
    keys = keys_for(3, seed=77)
    words = torch.from_numpy(key_words(keys))
    ids = torch.tensor([[0, 1, 2, 65_535, 151_935, 2**31 - 1]], dtype=torch.int32)
    got = exponential(ids, words)
    for row, key in enumerate(keys.tolist()):
        for column, token in enumerate(ids[0].tolist()):
            h = lowbias32(token * (key >> 32 | 1) + (key & 0xFFFFFFFF) & 0xFFFFFFFF)
            exact = -math.log1p(-(h + 0.5) * 2.0**-32)
            assert float(got[row, column]) == pytest.approx(exact, rel=1e-4, abs=1e-9)


def splitmix64(z: int) -> int:
    mask = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def test_draw_keys_equal_splitmix64_in_unbounded_integers() -> None:
    # First value of the published generator for seed 1234567.
    assert splitmix64(1234567) == 6457827717110365317
    cases = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 127, 2**31), (7, 3, 9)]
    got = draw_keys(*(np.array(column, np.uint64) for column in zip(*cases, strict=True)))
    want = [splitmix64(splitmix64(splitmix64(s) ^ c) ^ p) for s, c, p in cases]
    assert got.tolist() == want
    assert len(set(want)) == len(want)


def test_neighbouring_keys_draw_independently() -> None:
    """Draws at consecutive positions, seeds and choices are uncorrelated."""
    ids = torch.zeros(1, 1, dtype=torch.int32)
    count = 20_000
    counter, zero = np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)
    for columns in ((zero, zero, counter), (counter, zero, zero), (zero, counter, zero)):
        numbers = exponential(ids, torch.from_numpy(key_words(draw_keys(*columns))))[:, 0]
        uniform = (-numbers).expm1().neg().double().numpy()
        assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / count)
        assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 5 / math.sqrt(count)
