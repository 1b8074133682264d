"""A row's sums, logprobs and samplers have the same bits alone, in a batch, and on more threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.sampling.logprobs import logprobs
from penstock.kernels.sampling.row_sums import row_logsumexp, row_sum
from penstock.kernels.sampling.samplers.distribution import measures
from penstock.kernels.sampling.stages import model_logprob

VOCABULARY = 151_936
"""Of Qwen: more than what torch gives to one thread."""


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return 3.0 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def by_one_thread(rows: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = logprobs(rows, torch.arange(4), 2).chosen, [model_logprob(row, 7) for row in rows]
    torch.set_num_threads(before)
    return found


@pytest.mark.usefixtures("threads")
def test_a_rows_logprobs_do_not_depend_on_the_batch_or_the_threads(
    rows: torch.Tensor, by_one_thread: tuple[torch.Tensor, list[float]]
) -> None:
    wanted, of_the_model = by_one_thread
    for count in (1, 2, 3, 4):
        for first in range(4 - count + 1):
            part = slice(first, first + count)
            found = logprobs(rows[part], torch.arange(4)[part], 2).chosen
            assert torch.equal(found, wanted[part]), (count, first)
    assert [model_logprob(row, 7) for row in rows] == of_the_model


@pytest.mark.usefixtures("threads")
def test_a_rows_sums_do_not_depend_on_the_batch(rows: torch.Tensor) -> None:
    weights = rows.exp()
    together = row_sum(weights, torch.float64), row_logsumexp(rows)
    for at, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        assert torch.equal(row_sum(weight, torch.float64), together[0][at])
        assert torch.equal(row_sum(weight[None], torch.float64), together[0][at : at + 1])
        assert torch.equal(row_logsumexp(row), together[1][at])
    torch.testing.assert_close(together[0], weights.double().sum(-1))
    assert not row_sum(weights[:0]).numel()
    assert measures(rows[0].double()).log_total == pytest.approx(
        float((rows[0].double() - rows[0].max()).logsumexp(0))
    )
