"""The sampler's steps against the rules computed token by token in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.kernels.plain_sampler import (
    Request,
    adjusted,
    adjustments,
    probabilities,
    random_request,
    sampling_rows,
)

from penstock.kernels import sampling

GREEDY = 1e-5
DRAWS = 20
VOCABULARIES = [1, 2, 31, 33, 97, 700]


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Rounded, so that many tie."""
    logits = 2.5 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return (logits * 8).round() / 8


def adjusted_rows(logits: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """Every row of the reference's steps."""
    z = logits.float().clone()
    for step in adjustments(requests, logits.shape[1]):
        part = z[torch.from_numpy(step.rows)]
        place = np.full(len(requests), -1)
        place[step.rows] = np.arange(len(step.rows))
        step.apply(part, place)
        z[torch.from_numpy(step.rows)] = part
    return z


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_bans_biases_and_penalties_equal_the_rules(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    requests = [random_request(rng, vocab) for _ in range(60)]
    logits = random_logits(60, vocab, vocab)
    got = adjusted_rows(logits, requests).double().numpy()
    wanted = np.stack(
        [adjusted(row, request) for row, request in zip(logits.numpy(), requests, strict=True)]
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 33, 700, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_draw_leaves_the_set_that_the_rules_keep(vocab: int, dtype: torch.dtype) -> None:
    """60 random requests of 20 draws each; rounding may decide at a bound, nowhere else."""
    rng = np.random.default_rng(vocab)
    requests = [random_request(rng, vocab) for _ in range(60)]
    logits = random_logits(60, vocab, vocab).to(dtype)
    repeated = [request for request in requests for _ in range(DRAWS)]
    choice = sampling.choose(
        logits.repeat_interleave(DRAWS, 0), sampling_rows(repeated), GREEDY,
        adjustments(repeated, vocab),
    )  # fmt: skip
    tokens = choice.tokens.view(60, DRAWS).numpy()
    for row, request in enumerate(requests):
        z = logits[row].float().numpy()
        if np.isneginf(adjusted(z, request)).all():
            assert choice.bad.view(60, DRAWS)[row].all()
            continue
        assert not choice.bad.view(60, DRAWS)[row].any()
        kept = probabilities(z, request, slack=1e-6) > 0
        assert kept[tokens[row]].all(), request
        fewer = probabilities(z, request, slack=-1e-6)
        if kept.sum() <= 4 and fewer[kept].min() > 0.2:
            assert set(tokens[row]) == {*np.flatnonzero(kept)}, request


def test_draws_of_sixty_requests_follow_their_exact_distributions() -> None:
    """Chi-square over 2,000 draws each; the limit is 6 standard deviations above the mean."""
    vocab, count = 24, 2000
    rng = np.random.default_rng(3)
    for number in range(60):
        request = random_request(rng, vocab)
        request.allowed = None if request.allowed is None else [*range(0, vocab, 2)]
        logits = random_logits(1, vocab, number) / 2
        rows = sampling_rows([request] * count, seed=number)
        steps = adjustments([request] * count, vocab)
        tokens = sampling.choose(logits.expand(count, -1), rows, GREEDY, steps).tokens.numpy()
        got = np.bincount(tokens, minlength=vocab)
        exact = probabilities(logits[0].numpy(), request) * count
        assert got[exact == 0].sum() == 0, request
        common = exact >= 5
        got_parts = np.append(got[common], got[~common].sum())
        exact_parts = np.append(exact[common], exact[~common].sum())
        expected = np.maximum(exact_parts, 1e-9)
        statistic = float(((got_parts - exact_parts) ** 2 / expected).sum())
        freedom = max(1, int(common.sum()))
        assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 6, request


def test_ties_with_the_last_token_that_is_kept_are_kept() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, -0.0, 0.0]])
    for request, support in (
        (Request(top_k=2), {0, 1, 2, 3}),
        (Request(top_k=5), {0, 1, 2, 3, 4}),
        (Request(top_k=6), {0, 1, 2, 3, 4, 5, 6}),
        (Request(top_p=0.6), {0, 1, 2, 3}),
        (Request(top_p=0.0), {0}),
        (Request(min_p=0.5), {0}),
        (Request(min_p=0.3), {0, 1, 2, 3}),
        (Request(min_p=1.0), {0}),
        (Request(min_p=0.3, top_p=0.99), {0, 1, 2, 3}),
    ):
        rows = sampling_rows([request] * 3000)
        found = sampling.choose(logits.expand(3000, -1), rows, GREEDY).tokens
        assert set(found.tolist()) == support, request
        assert support == {*np.flatnonzero(probabilities(logits[0].numpy(), request))}


@pytest.mark.parametrize("scale", [pytest.param(0.01, marks=pytest.mark.slow), 3.0])
def test_min_p_is_exact_beyond_the_candidates_too(scale: float) -> None:
    vocab = 5 * sampling.CANDIDATES
    logits = scale * torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    for request in (
        Request(min_p=0.97), Request(min_p=0.2, top_p=0.5), Request(min_p=0.9, top_k=1500),
        Request(min_p=0.95, top_k=2500, top_p=0.7),
    ):  # fmt: skip
        kept = probabilities(logits[0].numpy(), request, slack=1e-6) > 0
        found = sampling.choose(logits.expand(400, -1), sampling_rows([request] * 400), GREEDY)
        assert kept[found.tokens.numpy()].all(), request
        if kept.sum() > 600:
            assert len({*found.tokens.tolist()}) > 200


def test_top_p_counts_only_what_min_p_and_top_k_left() -> None:
    """The weights are 4, 3, 2, 1 and the first two are left: 4 of 4 + 3 is enough for 0.5."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log().expand(500, -1)
    for limit in (Request(top_k=2, top_p=0.5), Request(min_p=0.7, top_p=0.5)):
        found = sampling.choose(logits, sampling_rows([limit] * 500), GREEDY).tokens
        assert set(found.tolist()) == {0}
    found = sampling.choose(logits, sampling_rows([Request(top_p=0.5)] * 500), GREEDY).tokens
    assert set(found.tolist()) == {0, 1}


def test_greedy_rows_follow_bans_and_penalties_and_no_limit() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0, 4.5, 4.0]] * 5)
    greedy = {"temperature": 0.0, "top_k": 3, "min_p": 0.5, "top_p": 0.1}
    requests = [
        Request(**greedy),  # type: ignore[arg-type]
        Request(**greedy, bans=[1]),  # type: ignore[arg-type]
        Request(**greedy, bans=[1], output=[3], presence=0.5),  # type: ignore[arg-type]
        Request(**greedy, biases={0: 4.5}),  # type: ignore[arg-type]
        Request(**greedy, biases={0: 100.0}, bans=[0, 1]),  # type: ignore[arg-type]
    ]
    choice = sampling.choose(logits, sampling_rows(requests), GREEDY, adjustments(requests, 5))
    assert choice.tokens.tolist() == [1, 3, 2, 0, 3]


def test_a_row_without_any_token_left_is_reported_and_disturbs_nobody() -> None:
    vocab = 50
    logits = random_logits(6, vocab, 4)
    logits[5, 7] = torch.nan
    requests = [
        Request(), Request(allowed=[]), Request(bans=[*range(vocab)], temperature=0.0),
        Request(output=[3], frequency=2.0, top_k=7), Request(biases={4: 2.0}, top_p=0.5),
        Request(output=[7], presence=1.0),
    ]  # fmt: skip
    choice = sampling.choose(logits, sampling_rows(requests), GREEDY, adjustments(requests, vocab))
    assert choice.bad.tolist() == [0, 1, 1, 0, 0, 2]
    assert 0 <= int(choice.tokens.min()) <= int(choice.tokens.max()) < vocab
    for row in (0, 3, 4):
        alone = [requests[row]]
        rows = sampling_rows(requests).take(np.array([row]))
        single = sampling.choose(logits[row : row + 1], rows, GREEDY, adjustments(alone, vocab))
        assert single.tokens[0] == choice.tokens[row]
        assert not single.bad[0]


def test_a_row_that_asks_for_nothing_draws_the_same_beside_rows_that_ask() -> None:
    vocab = 300
    rng = np.random.default_rng(8)
    logits = random_logits(40, vocab, 9).bfloat16()
    requests = [Request() if row % 2 else random_request(rng, vocab) for row in range(40)]
    rows = sampling_rows(requests)
    steps = adjustments(requests, vocab)
    together = sampling.choose(logits, rows, GREEDY, steps).tokens
    plain = sampling.sample(logits, sampling_rows([Request()] * 40), GREEDY)
    assert torch.equal(together[1::2], plain[1::2])


def test_counts_follow_the_tokens_and_stay_at_their_limit() -> None:
    counts = torch.zeros(3, 10, dtype=torch.int16)
    prompt, output = np.array([2, 3, 3], np.int32), np.array([3, 5, 5], np.int32)
    counts[1] = 9
    sampling.begin_counts(counts, 1, prompt, output)
    assert (counts[1].int() & 0x7FFF).tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 0, 0]
    assert (counts[1] < 0).tolist() == [t in (2, 3) for t in range(10)]
    sampling.begin_counts(counts, 2, prompt[:0], np.full(40_000, 4, np.int32))
    sampling.add_outputs(counts, np.array([1, 2]), np.array([2, 4]))
    sampling.add_outputs(counts, np.array([1, 0]), np.array([2, 9]))
    assert (counts[1].int() & 0x7FFF)[:4].tolist() == [0, 0, 2, 1]
    assert int(counts[1, 2]) < 0
    assert int(counts[2, 4]) == 0x7FFF
    assert counts[0].tolist() == [0] * 9 + [1]


def test_bad_words_follow_the_outputs_around_the_ring() -> None:
    """Each step compared with the rule, over three turns of the ring."""
    rng = np.random.default_rng(5)
    words = [[0], [1, 2], [0, 1, 0], [3, 3, 3, 3], [*rng.integers(0, 4, 63).tolist(), 4]]
    table = sampling.WordTable(2)
    table.begin(1, words, [])
    output: list[int] = words[-1][:-1]
    table.begin(1, words, output)
    logits, seen = np.zeros(5), set()
    for _ in range(200):
        found = table.bans(np.array([7]), np.array([1]), np.array([len(output)]))
        z = adjusted(logits, Request(bad_words=words, output=output))
        assert {*found.tokens.tolist()} == {*np.flatnonzero(np.isneginf(z))}
        assert (found.entry_rows == 7).all()
        seen.add(tuple(sorted({*found.tokens.tolist()})))
        token = int(rng.integers(0, 4))
        table.add_outputs(np.array([1]), np.array([token]), np.array([len(output)]))
        output.append(token)
    assert seen >= {(0,), (0, 2), (0, 3)}
    assert any(4 in banned for banned in seen)
    empty = table.bans(np.array([0]), np.array([0]), np.array([3]))
    assert len(empty.tokens) == 0


def test_words_beyond_the_limits_are_refused_by_name() -> None:
    table = sampling.WordTable(1)
    for words in ([[1]] * 129, [[1] * 65], [[1] * 60] * 40):
        with pytest.raises(ValueError, match="bad words of"):
            table.begin(0, words, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "most"), [(1, 1), (33, 20), (1000, 20), (1000, 1), (50, 0)])
def test_logprobs_and_ranks_equal_the_rules(vocab: int, most: int, dtype: torch.dtype) -> None:
    """Rounded logits: of those that tie, the lowest ids come first."""
    logits = random_logits(9, vocab, vocab).to(dtype)
    tokens = torch.randint(0, vocab, (9,), generator=torch.Generator().manual_seed(0))
    found = sampling.logprobs(logits, tokens, most)
    z = logits.double().numpy()
    exact = z - np.log(np.exp(z).sum(-1, keepdims=True))
    for row, token in enumerate(tokens.tolist()):
        assert float(found.chosen[row]) == pytest.approx(exact[row, token], abs=1e-5)
        assert int(found.rank[row]) == 1 + int((z[row] > z[row, token]).sum())
        order = np.argsort(-z[row], kind="stable")[:most]
        assert found.top_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(found.top[row].numpy(), exact[row, order], atol=1e-5)


def test_logprobs_of_a_sick_row_disturb_nobody() -> None:
    logits = random_logits(4, 90, 3)
    healthy = sampling.logprobs(logits, torch.arange(4), 20)
    logits[1], logits[2, 5] = torch.nan, torch.inf
    sick = sampling.logprobs(logits, torch.arange(4), 20)
    for mine, theirs in zip(sick, healthy, strict=True):
        assert torch.equal(mine[[0, 3]], theirs[[0, 3]])
