"""The bests of ranks, each over its own columns, make the draw of one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.gpu.draw import commit, draw
from penstock.kernels.gpu.sampler_memory import vocab_splits
from penstock.kernels.gpu.shard_draws import commit_shards, own_best
from penstock.kernels.sampling import NOT_FINITE, NOTHING_LEFT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY_BELOW = 1e-3
SLOTS = 8
Shares = list[tuple[int, int]]
"""First column and width of each."""


def words(count: int, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=made).to(torch.int32).to(DEVICE)


class Draws:
    """A step of rows, drawn whole or by ranks."""

    def __init__(self, logits: Tensor, temperatures: list[float], slots: list[int]) -> None:
        self.logits = logits.to(DEVICE)
        self.rows = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        warmth = torch.zeros(SLOTS)
        warmth[: len(temperatures)] = torch.tensor(temperatures)
        self.asked = (warmth.to(DEVICE), words(SLOTS, 1), words(SLOTS, 2))
        self.number = torch.arange(SLOTS, dtype=torch.int32, device=DEVICE)

    def found(self, logits: Tensor, rows: Tensor, first: int) -> tuple[Tensor, Tensor, int]:
        parts = len(logits) * vocab_splits(logits.shape[1])
        best = torch.full((parts,), torch.nan, device=DEVICE)
        token = torch.zeros(parts, dtype=torch.int32, device=DEVICE)
        splits = draw(
            logits, rows, *self.asked, self.number, best, token, GREEDY_BELOW, first=first
        )
        return best, token, splits

    def committed(self) -> list[Tensor]:
        """Where the tokens of a step and what advances with them are written."""
        columns = [torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE) for _ in range(2)]
        result = torch.full((2, SLOTS), -1, dtype=torch.int32, device=DEVICE)
        return [*columns, self.number.clone(), result]

    def whole(self) -> list[Tensor]:
        best, token, splits = self.found(self.logits, self.rows, 0)
        out = self.committed()
        commit(best, token, self.rows, *out, len(self.rows), splits)
        return out

    def by_ranks(self, shares: Shares) -> list[Tensor]:
        parts = torch.empty(len(shares), len(self.rows), 2, dtype=torch.int32, device=DEVICE)
        for part, (first, width) in zip(parts, shares, strict=True):
            own = self.logits[:, first : first + width].contiguous()
            best, token, splits = self.found(own, self.rows, first)
            own_best(best, token, self.rows, len(self.rows), splits, part, first)
        out = self.committed()
        commit_shards(parts, self.rows, *out)
        return out


def check(draws: Draws, shares: Shares) -> list[int]:
    wanted, got = draws.whole(), draws.by_ranks(shares)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
    return got[-1][1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shares", [[(0, 4500), (4500, 4500)], [(0, 3000), (3000, 3000), (6000, 2999)]]
)
def test_ranks_draw_what_one_device_draws(dtype: torch.dtype, shares: Shares) -> None:
    width = sum(count for _, count in shares)
    made = torch.Generator().manual_seed(4)
    logits = (3 * torch.randn(5, width, generator=made)).to(dtype)
    bad = check(Draws(logits, [0.0, 0.7, 1.3, 0.2], [2, 0, -1, 1, 3]), shares)
    assert bad[:2] == [0, 0]


def test_of_equals_on_several_ranks_the_lowest_token_wins() -> None:
    logits = torch.zeros(2, 300)
    logits[0, 250] = logits[0, 120] = 1.0
    draws = Draws(logits, [0.0, 0.0], [0, 1])
    check(draws, [(0, 100), (100, 100), (200, 100)])
    assert draws.by_ranks([(0, 100), (100, 100), (200, 100)])[-1][0, :2].tolist() == [120, 0]


def test_why_a_row_has_no_token_is_known_to_all() -> None:
    logits = torch.zeros(4, 300)
    logits[0] = -torch.inf
    logits[1, 299] = torch.nan
    logits[2, :200] = -1e30
    bad = check(Draws(logits, [0.0, 0.9, 0.9, 0.0], [0, 1, 2, 3]), [(0, 150), (150, 150)])
    assert bad[:4] == [NOT_FINITE, NOT_FINITE, 0, 0]


def test_a_rank_may_have_no_best() -> None:
    """Rows that the first rank alone chooses; and a row of which nobody has any."""
    parts = torch.zeros(2, 3, 2, dtype=torch.int32, device=DEVICE)
    nobody = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    for part in parts:
        own_best(torch.empty(3, device=DEVICE), nobody, nobody, 3, 1, part)
    rows = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    best = torch.tensor([-4.5, 2.5, 0.0], device=DEVICE)
    token = torch.tensor([299, 7, 9], dtype=torch.int32, device=DEVICE)
    index = torch.tensor([2, 0], device=DEVICE)
    own_best(best, token, rows, 2, 1, parts[0], index=index)
    draws = Draws(torch.zeros(1, 1), [], [0, 1, 2])
    out = draws.committed()
    commit_shards(parts, draws.rows, *out)
    assert out[-1][0, :3].tolist() == [7, 0, 299]
    assert out[-1][1, :3].tolist() == [0, NOTHING_LEFT, 0]
