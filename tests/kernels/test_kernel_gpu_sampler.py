"""The sampler's kernels against the rules in float64, and against the reference's tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from support.kernels.device_sampler import DeviceSampler
from support.kernels.plain_sampler import (
    Request,
    adjusted,
    adjustments,
    probabilities,
    random_request,
)
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU

from penstock.kernels import sampling
from penstock.kernels.draw_keys import draw_keys
from penstock.kernels.gpu import draw
from penstock.kernels.gpu.logprobs import logprob_columns, logprobs
from penstock.kernels.gpu.sampler_memory import sampler_space

VOCABULARIES = [1, 33, 5003, 32_000, 151_936] if ON_GPU else [1, 33, 5003]
LARGE = 151_936 if ON_GPU else 9001
ROWS = 64 if ON_GPU else 10
GREEDY = 1e-5
SLACK = 1e-5


def random_logits(
    rows: int, vocab: int, seed: int, scale: float = 2.5, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    logits = scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return logits.to(dtype).to(DEVICE)


def plain_limits(request: Request) -> Request:
    """The same request of logits that are adjusted already."""
    return Request(request.temperature, request.top_k, request.top_p, request.min_p)


def check_floors(batch: DeviceSampler, logits: torch.Tensor, requests: list[Request]) -> list[bool]:
    """Every row's kept set is the exact one but for rounding. Returns where no rounding matters."""
    z = batch.adjusted.numpy()
    floors = batch.space.floor.cpu().numpy()
    certain = []
    for row, request in enumerate(requests):
        if not np.isfinite(z[row]).any():
            certain.append(False)
            continue
        kept = (z[row] >= floors[row]) & (z[row] > -np.inf)
        limits = plain_limits(request)
        most = probabilities(z[row], limits, SLACK) > 0
        least = probabilities(z[row], limits, -SLACK) > 0
        assert (kept <= most).all(), (row, request, kept.sum(), most.sum())
        assert (least <= kept).all(), (row, request, kept.sum(), least.sum())
        certain.append(bool((most == least).all()))
    return certain


def reference_rows(requests: list[Request], seed: int = 1) -> sampling.SamplingRows:
    """With the keys that slots of these requests draw with."""
    count = len(requests)
    zeros = np.zeros(count, np.uint64)
    positions = np.array([len(request.output) for request in requests], np.uint64)
    return sampling.SamplingRows(
        np.array([request.temperature for request in requests], np.float32),
        np.array([request.top_k for request in requests], np.int64),
        np.array([request.top_p for request in requests], np.float32),
        draw_keys(zeros + np.uint64(seed), zeros, positions),
        np.array([request.min_p for request in requests], np.float32),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_chain_gives_the_references_tokens(vocab: int, dtype: torch.dtype) -> None:
    """Random requests of every kind; also greedy ones, and ones that ask for nothing."""
    rng = np.random.default_rng(vocab)
    requests = [random_request(rng, vocab) for _ in range(ROWS)]
    requests[3] = Request()
    requests[7] = dataclasses.replace(requests[7], temperature=0.0)
    requests[9] = Request(temperature=0.0, top_k=5)
    logits = random_logits(ROWS, vocab, vocab, dtype=dtype)
    batch = DeviceSampler(requests, vocab)
    tokens, bad = batch.step(logits)
    z = batch.adjusted.double().numpy()
    wanted = np.stack(
        [
            adjusted(row, request)
            for row, request in zip(logits.float().cpu().numpy(), requests, strict=True)
        ]
    )
    np.testing.assert_allclose(z, wanted, rtol=1e-6, atol=1e-5)
    drawn = [request.temperature > 0 for request in requests]
    certain = np.ones(ROWS, bool)
    certain[drawn] = check_floors_of(batch, logits, requests, np.flatnonzero(drawn))
    choice = sampling.choose(
        logits.cpu(), reference_rows(requests), GREEDY, adjustments(requests, vocab)
    )
    assert bad == choice.bad.int().tolist()
    expected = choice.tokens.tolist()
    for row in np.flatnonzero(certain):
        assert tokens[row] == expected[row], requests[row]
    assert all(0 <= token < vocab for token in tokens)


def check_floors_of(
    batch: DeviceSampler, logits: torch.Tensor, requests: list[Request], rows: np.ndarray
) -> np.ndarray:
    """``check_floors`` of some rows."""
    every = [requests[row] if row in rows else Request() for row in range(len(requests))]
    return np.array(check_floors(batch, logits, every))[rows]


@pytest.mark.parametrize(
    ("scale", "candidates", "some"),
    [
        (0.0, 256, "even"),
        *(
            pytest.param(scale, candidates, "all", marks=pytest.mark.slow)
            for scale, candidates in (
                *((0.0, 256), (0.02, 256), (0.02, 4096)),
                *((1.0, 256), (1.0, 4096), (6.0, 4096)),
            )
        ),
        (6.0, 4096, "odd"),
    ],
)
def test_floors_are_exact_whatever_the_shape_of_the_distribution(
    scale: float, candidates: int, some: str
) -> None:
    """Flat, where passes over the row are needed, and steep; all equal, where all ties are kept."""
    limits: list[dict[str, float]] = [
        {"top_k": 1}, {"top_k": 20, "top_p": 0.95}, {"top_k": 300}, {"top_k": 3000},
        {"top_k": LARGE - 1}, {"top_p": 0.9}, {"top_p": 0.2}, {"top_p": 0.0}, {"top_p": 0.9999},
        {"min_p": 0.05}, {"min_p": 1.0}, {"min_p": 0.3, "top_p": 0.8},
        {"min_p": 0.9, "top_k": 5000, "top_p": 0.7}, {"top_k": 4000, "top_p": 0.5},
        {"min_p": 1e-9, "top_p": 0.97}, {"top_k": LARGE, "top_p": 0.5},
    ]  # fmt: skip
    requests = [Request(temperature=1.0 - 0.03 * i, **kind) for i, kind in enumerate(limits)]  # type: ignore[arg-type]
    requests = {"all": requests, "even": requests[::2], "odd": requests[1::2]}[some]
    logits = random_logits(len(requests), LARGE, 4, scale)
    batch = DeviceSampler(requests, LARGE, candidates=candidates)
    batch.adjust(logits)
    check_floors(batch, logits, requests)


@pytest.mark.slow
def test_ties_with_the_last_token_that_is_kept_are_kept() -> None:
    """A few distinct values only, among them 0 and -0."""
    vocab = 5003
    rng = np.random.default_rng(1)
    values = np.array([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0], np.float32)
    logits = torch.from_numpy(rng.choice(values, (8, vocab))).to(DEVICE)
    requests = [
        Request(top_k=3), Request(top_k=1500), Request(top_k=4800), Request(top_p=0.5),
        Request(top_p=0.99), Request(min_p=0.2), Request(min_p=0.1, top_p=0.9),
        Request(top_k=2000, top_p=0.95, output=[4], presence=1.0),
    ]  # fmt: skip
    batch = DeviceSampler(requests, vocab, candidates=1024)
    batch.adjust(logits)
    assert all(check_floors(batch, logits, requests))


def test_rows_that_ask_for_nothing_draw_the_same_bits_beside_rows_that_ask() -> None:
    vocab, count = 5003, 3
    rng = np.random.default_rng(3)
    logits = random_logits(count, vocab, 5, dtype=DTYPES[0])
    requests = [Request() if row % 3 else random_request(rng, vocab) for row in range(count)]
    batch, alone = DeviceSampler(requests, vocab), DeviceSampler([Request()] * count, vocab)
    batch.adjust(logits)
    batch.draw(logits)
    alone.draw(logits, plain=True)
    plain = [row for row in range(count) if row % 3]
    for mine, theirs in ((batch.best, alone.best), (batch.token, alone.token)):
        assert torch.equal(mine.view(count, -1)[plain], theirs.view(count, -1)[plain])


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 20])
def test_tokens_do_not_depend_on_how_rows_are_cut(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steep and flat rows; greedy ones; a temperature of next to nothing, where values are huge;
    rounded logits, so that many tie."""
    vocab, count = 9001, 10
    rng = np.random.default_rng(11)
    requests = [random_request(rng, vocab) if row % 2 else Request() for row in range(count)]
    requests[0], requests[4] = Request(temperature=0.0), Request(temperature=2e-5)
    requests[6] = Request(temperature=0.0, output=[5], presence=0.5)
    requests[8] = Request(temperature=0.9, output=[7] * 3, frequency=0.5)
    scale = torch.linspace(0.0, 6.0, count)[:, None].to(DEVICE)
    logits = (random_logits(count, vocab, 7, 1.0) * scale * 4).round() / 4
    few = DeviceSampler(requests, vocab)
    tokens = few.step(logits)
    monkeypatch.setattr(draw, "_FEW_EACH", 0)
    monkeypatch.setattr(draw, "_PROGRAMS_EACH", 1)
    monkeypatch.setattr(draw, "multiprocessors", lambda: programs)
    many = DeviceSampler(requests, vocab)
    assert many.step(logits) == tokens
    assert many.splits < few.splits


def test_a_row_is_the_same_alone_and_rows_without_a_slot_are_left_alone() -> None:
    vocab, count = 5003, 6
    rng = np.random.default_rng(6)
    requests = [random_request(rng, vocab) for _ in range(count)]
    logits = random_logits(count, vocab, 1)
    together, _ = DeviceSampler(requests, vocab).step(logits)
    batch = DeviceSampler(requests, vocab)
    batch.rows[[0, 2, 3, 5]] = -1
    found, bad = batch.step(logits)
    assert [found[1], found[4]] == [together[1], together[4]]
    assert [found[row] for row in (0, 2, 3, 5)] == [-7] * 4
    assert [bad[row] for row in (0, 2, 3, 5)] == [-7] * 4


def test_rows_without_any_token_left_are_reported_and_disturb_nobody() -> None:
    vocab = 4200
    logits = random_logits(8, vocab, 2)
    requests = [
        Request(allowed=[]), Request(temperature=0.0, bans=[*range(vocab)]),
        Request(top_p=0.5, allowed=[]), Request(top_k=5), Request(top_p=0.5),
        Request(min_p=0.5, output=[3], presence=1.0), Request(temperature=0.0, biases={1: 2.0}),
        Request(top_k=3),
    ]  # fmt: skip
    healthy, _ = DeviceSampler(requests[7:], vocab).step(logits[7:])
    logits[3, 4100], logits[4, 0], logits[5, 9] = math.nan, math.inf, -math.inf
    logits[6, 17] = math.nan
    tokens, bad = DeviceSampler(requests, vocab).step(logits)
    assert bad == [1, 1, 1, 2, 2, 2, 2, 0]
    assert tokens[7:] == healthy
    assert all(0 <= token < vocab for token in tokens)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_what_adjustments_make_infinite_is_not_the_models_doing(temperature: float) -> None:
    vocab = 5003
    logits = random_logits(5, vocab, 3).abs()
    endless = Request(temperature=temperature, repetition=1e-40, output=[4900])
    requests = [
        endless, dataclasses.replace(endless, top_k=5), dataclasses.replace(endless, bans=[1]),
        endless, dataclasses.replace(endless, top_p=0.5, bans=[1]),
    ]  # fmt: skip
    logits[3, 4900] = logits[4, 17] = math.nan
    tokens, bad = DeviceSampler(requests, vocab).step(logits)
    assert bad == [1, 1, 1, 2, 2]
    assert all(0 <= token < vocab for token in tokens)


def test_entries_end_with_the_output_that_they_are_for() -> None:
    """min_tokens: the end token is banned while the output has less than 3 tokens."""
    vocab = 100
    logits = random_logits(3, vocab, 0)
    logits[:, 42] = 30.0
    requests = [Request(temperature=0.0, bans=[42], output=[5] * n) for n in (0, 2, 3)]
    tokens, _ = DeviceSampler(requests, vocab, until=3).step(logits)
    assert [token == 42 for token in tokens] == [False, False, True]


def test_counts_and_bad_words_follow_the_device_from_step_to_step() -> None:
    """Around the end of the ring; each step compared with the rules for the output so far."""
    vocab, steps = 40, 14 if ON_GPU else 5
    rng = np.random.default_rng(9)
    long = rng.integers(0, 3, 63).tolist()
    words = [[1, 2], [3], [4, 4, 4], [7, 8, 7, 8]]
    requests = [
        Request(temperature=1.5, frequency=0.4, presence=-0.3, repetition=1.2, prompt=[1, 2],
                output=[4, 3] * 30, bad_words=words),
        Request(temperature=0.0, frequency=0.7, bad_words=[[n] for n in range(5)]),
        Request(temperature=2.0, output=long, allowed=[0, 1, 2, 7],
                bad_words=[[*long, 7], [0, 1], [0, 0, 2], [1, 2], [2, 0], [7, 7]]),
        Request(temperature=0.7, repetition=0.7, output=[9, 9, 9]),
    ]  # fmt: skip
    batch = DeviceSampler(requests, vocab)
    now = [dataclasses.replace(request, output=[*request.output]) for request in requests]
    for step in range(steps):
        logits = random_logits(len(requests), vocab, step)
        before = [dataclasses.replace(request, output=[*request.output]) for request in now]
        tokens, bad = batch.step(logits)
        choice = sampling.choose(
            logits.cpu(), reference_rows(before), GREEDY, adjustments(before, vocab)
        )
        assert tokens == choice.tokens.tolist()
        assert not any(bad)
        for request, token in zip(now, tokens, strict=True):
            request.output.append(token)
    counts = batch.slots.counts[batch.rows.long()].cpu().int()
    for row in (0, 1, 3):
        times = np.bincount(now[row].output, minlength=vocab)
        assert (counts[row] & 0x7FFF).tolist() == times.tolist()
    assert (counts[0] < 0).tolist() == [token in (1, 2) for token in range(vocab)]


def test_a_count_stays_at_its_limit() -> None:
    request = Request(temperature=0.0, presence=0.1)
    batch = DeviceSampler([request], 9)
    batch.slots.counts[0, 4] = -1
    logits = torch.zeros(1, 9, device=DEVICE)
    logits[0, 4] = 9.0
    batch.step(logits)
    assert batch.slots.counts[0].tolist() == [0, 0, 0, 0, -1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [20, 33, 200, LARGE])
def test_logprobs_equal_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """Rounded logits: many tie, across groups and splits too."""
    count = 7
    logits = ((random_logits(count, vocab, 3) * 4).round() / 4).to(dtype)
    tokens = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1))
    order = [4, 6, 0, 2, 1, 5, 3]
    wanted = [20, 5, -1, 0, 20, 1, 20]
    by_slot = torch.zeros(2, count, dtype=torch.int32)
    by_slot[0, order] = torch.tensor(wanted, dtype=torch.int32)
    by_slot[1, order] = tokens.to(torch.int32)
    by_slot = by_slot.to(DEVICE)
    rows = torch.tensor(order, dtype=torch.int32, device=DEVICE)
    rows[6] = -1
    out = logprob_columns(count, DEVICE)
    for column in out:
        column.fill_(-9)
    logprobs(logits, rows, by_slot[0], by_slot[1], sampler_space(count, vocab, DEVICE), out)
    exact = sampling.logprobs(logits.cpu(), tokens, 20)
    found = type(out)(*(column.cpu() for column in out))
    for row in range(count):
        if wanted[row] < 0 or row == 6:
            assert float(found.chosen[row]) == int(found.rank[row]) == -9
            assert (found.top_ids[row] == -9).all()
            continue
        most = wanted[row]
        assert float(found.chosen[row]) == pytest.approx(float(exact.chosen[row]), abs=2e-5)
        assert int(found.rank[row]) == int(exact.rank[row])
        assert found.top_ids[row, :most].tolist() == exact.top_ids[row, :most].tolist()
        torch.testing.assert_close(
            found.top[row, :most], exact.top[row, :most], atol=2e-5, rtol=1e-5
        )
        assert (found.top_ids[row, most:] == -9).all()


@pytest.mark.skipif(not ON_GPU, reason="takes the interpreter minutes")
def test_draws_behind_a_floor_follow_the_exact_distribution() -> None:
    """Chi-square over the slots of one request; the limit is 6 standard deviations above."""
    vocab, count, turns = 24, 256, 40
    request = Request(
        temperature=1.2, top_k=12, top_p=0.9, min_p=0.02, output=[1, 1, 3], frequency=0.4
    )
    logits = random_logits(1, vocab, 8, 1.5).expand(count, -1).contiguous()
    got = np.zeros(vocab)
    for turn in range(turns):
        batch = DeviceSampler([request] * count, vocab, seed=turn)
        batch.slots.num_output.copy_(torch.arange(count, dtype=torch.int32))
        got += np.bincount(batch.step(logits)[0], minlength=vocab)
    exact = probabilities(logits[0].cpu().numpy(), request) * count * turns
    assert got[exact == 0].sum() == 0
    support = exact > 0
    freedom = int(support.sum()) - 1
    statistic = float((((got - exact) ** 2)[support] / exact[support]).sum())
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 6
