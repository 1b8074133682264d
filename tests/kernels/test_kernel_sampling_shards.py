"""Ranks that have a part of the vocabulary each draw what one device draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from support.kernels.shards_in_threads import ShardsInThreads
from torch import Tensor

from penstock.kernels.sampling import (
    NOT_FINITE,
    NOTHING_LEFT,
    Adjustment,
    AllowedTokens,
    Penalties,
    SamplerStages,
    SamplingRows,
    Stage,
    TokenBiases,
    allowed_mask,
    choose,
    logprobs,
)
from penstock.kernels.sampling.shard_logprobs import shard_logprobs
from penstock.kernels.sampling.shards import choose_shards

GREEDY_BELOW = 1e-3
STAGES = [
    [Stage("temperature", [0.7]), Stage("typical_p", [0.9])],
    [Stage("tfs", [0.95]), Stage("top_p", [0.9])],
    [Stage("mirostat", [3.0, 0.1])],
    [Stage("xtc", [0.05, 0.6])],
]


def asked(random: np.random.Generator, count: int, vocab: int) -> SamplingRows:
    def some(values: Sequence[float]) -> np.ndarray:
        return random.choice(values, count)

    return SamplingRows(
        some([0.0, 0.4, 1.0, 1.7]).astype(np.float32),
        some([0, 1, 7, vocab // 2, vocab + 9]).astype(np.int64),
        some([1.0, 1.0, 0.05, 0.9, 0.9999]).astype(np.float32),
        random.integers(0, 2**64, count, np.uint64),
        some([0.0, 0.0, 0.02, 0.7]).astype(np.float32),
    )


def logits_of(random: np.random.Generator, count: int, vocab: int) -> Tensor:
    """Now with many ties, now with none, in several types."""
    kind = random.integers(3)
    if kind == 0:
        return torch.from_numpy(random.integers(-3, 4, (count, vocab)).astype(np.float32))
    z = torch.from_numpy(random.normal(0, 3, (count, vocab)).astype(np.float32))
    return z.bfloat16() if kind == 1 else z


def adjusted(
    random: np.random.Generator, rows: SamplingRows, vocab: int, *, stages: bool
) -> list[Adjustment]:
    count = len(rows.temperature)

    def some() -> np.ndarray:
        return np.sort(random.choice(count, random.integers(1, count + 1), replace=False))

    masked, biased, penalised, staged = some(), some(), some(), some()
    masks = [
        allowed_mask(random.choice(vocab, random.integers(1, vocab), replace=False), vocab)
        for _ in masked
    ]
    entries = random.integers(1, 20)
    values = random.normal(0, 4, entries).astype(np.float32)
    values[random.random(entries) < 0.3] = -np.inf
    counts = torch.from_numpy(random.integers(-5, 4, (count, vocab)).astype(np.int16))
    found: list[Adjustment] = [
        AllowedTokens(masked, torch.from_numpy(np.stack(masks))),
        TokenBiases(random.choice(biased, entries), random.integers(0, vocab, entries), values),
        Penalties(
            penalised, *(random.uniform(0.1, 2, (3, len(penalised))).astype(np.float32)),
            penalised, counts,
        ),
    ]  # fmt: skip
    if stages:
        chosen = [STAGES[number] for number in random.integers(0, len(STAGES), len(staged))]
        found.append(SamplerStages(staged, chosen, rows.keys[staged], [5.0] * len(staged)))
    return found


def check(
    logits: Tensor, rows: SamplingRows, adjustments: list[Adjustment], shares: int
) -> ShardsInThreads:
    shards = ShardsInThreads(logits.shape[1], shares)
    wanted = choose(logits, rows, GREEDY_BELOW, adjustments)
    for choice in shards.run(
        lambda shard, own: choose_shards(logits[:, own], rows, GREEDY_BELOW, adjustments, shard)
    ):
        assert choice.bad.tolist() == wanted.bad.tolist()
        good = wanted.bad == 0
        assert choice.tokens[good].tolist() == wanted.tokens[good].tolist()
    return shards


@pytest.mark.parametrize("seed", range(40))
def test_ranks_choose_what_one_device_chooses_whatever_rows_ask_for(seed: int) -> None:
    random = np.random.default_rng(seed)
    vocab, shares = int(random.choice([37, 64, 307, 1000])), int(random.integers(2, 6))
    count = int(random.integers(1, 8))
    logits, rows = logits_of(random, count, vocab), asked(random, count, vocab)
    check(logits, rows, [], shares)
    check(logits, rows, adjusted(random, rows, vocab, stages=bool(seed % 2)), shares)


def test_of_equal_logits_the_lowest_token_wins_whichever_rank_has_it() -> None:
    logits = torch.full((3, 100), -1.0)
    logits[0, 77] = logits[0, 40] = 2.0
    logits[2] = -0.0
    logits[2, 90] = 0.0
    shards = ShardsInThreads(100, 4)
    rows = SamplingRows.greedy(3)
    for choice in shards.run(
        lambda shard, own: choose_shards(logits[:, own], rows, GREEDY_BELOW, [], shard)
    ):
        assert choice.tokens.tolist() == [40, 0, 0]


@pytest.mark.parametrize("allowed", [[306], [0], [200, 306]])
def test_a_mask_may_leave_ranks_without_a_column(allowed: list[int]) -> None:
    random = np.random.default_rng(7)
    rows = asked(random, 6, 307)
    masks = torch.from_numpy(np.stack([allowed_mask(allowed, 307)] * 6))
    check(logits_of(random, 6, 307), rows, [AllowedTokens(np.arange(6), masks)], 3)


def test_rows_without_a_token_are_told_apart_as_on_one_device() -> None:
    random = np.random.default_rng(3)
    logits = torch.from_numpy(random.normal(0, 1, (4, 50)).astype(np.float32))
    logits[1, 49] = torch.nan
    logits[2, 3] = torch.inf
    none = TokenBiases(np.zeros(50, np.int64), np.arange(50), np.full(50, -np.inf, np.float32))
    rows = SamplingRows.greedy(4)
    shards = ShardsInThreads(50, 4)
    for choice in shards.run(
        lambda shard, own: choose_shards(logits[:, own], rows, GREEDY_BELOW, [none], shard)
    ):
        assert choice.bad.tolist() == [NOTHING_LEFT, NOT_FINITE, NOT_FINITE, 0]


def test_only_rows_whose_limit_lies_beyond_the_candidates_are_gathered() -> None:
    random = np.random.default_rng(5)
    logits = torch.from_numpy(random.normal(0, 0.01, (4, 4000)).astype(np.float32))
    logits[1, 17] = 30.0
    rows = SamplingRows(
        np.ones(4, np.float32), np.array([0, 0, 50, 3000]),
        np.array([0.9, 0.9, 0.9, 1.0], np.float32), random.integers(0, 2**64, 4, np.uint64),
    )  # fmt: skip
    assert check(logits, rows, [], 3).gathered == [2]


def test_only_rows_with_samplers_that_need_all_columns_are_gathered() -> None:
    random = np.random.default_rng(6)
    logits, rows = logits_of(random, 5, 307), SamplingRows.greedy(5)
    stages = SamplerStages(np.array([1, 3]), STAGES[:2], rows.keys[:2], [0.0, 0.0])
    assert check(logits, rows, [stages], 2).gathered == [2]


@pytest.mark.parametrize(
    ("top_k", "top_p", "most"), [(0, 1.0, 16), (40, 1.0, 16 + 160 + 8), (0, 0.9, 16 + 4096 + 16)]
)
def test_few_numbers_of_a_row_travel_whatever_the_vocabulary(
    top_k: int, top_p: float, most: int
) -> None:
    random = np.random.default_rng(8)
    count, vocab = 8, 20_000
    logits = torch.from_numpy(random.normal(0, 4, (count, vocab)).astype(np.float32))
    rows = SamplingRows(
        np.ones(count, np.float32), np.full(count, top_k), np.full(count, top_p, np.float32),
        random.integers(0, 2**64, count, np.uint64),
    )  # fmt: skip
    assert sum(check(logits, rows, [], 2).sent) <= count * most


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [0, 1, 20])
def test_logprobs_of_ranks_are_those_of_one_device(seed: int, most: int) -> None:
    random = np.random.default_rng(seed)
    logits = logits_of(random, 4, 307)
    tokens = torch.from_numpy(random.integers(0, 307, 4))
    wanted = logprobs(logits, tokens, most)
    shards = ShardsInThreads(307, 4)
    for found in shards.run(lambda shard, own: shard_logprobs(logits[:, own], tokens, most, shard)):
        assert found.rank.tolist() == wanted.rank.tolist()
        assert found.top_ids.tolist() == wanted.top_ids.tolist()
        torch.testing.assert_close(found.chosen, wanted.chosen, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.top, wanted.top, rtol=1e-5, atol=1e-5)
    assert sum(shards.sent) <= 4 * (12 + 8 * (1 + most))
