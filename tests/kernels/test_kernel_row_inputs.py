"""What code that is not ours is given of a step's rows, and what is taken from it."""

from __future__ import annotations

import pytest
import torch
from support.kernels.triton_device import DEVICE, DTYPES

from penstock.kernels.gpu.attention_arguments import DecodeBatch
from penstock.kernels.gpu.row_inputs import pack_heads, row_inputs

LAST_TOKEN = [100, 101, 102, 103, 104]
POSITIONS = [10, 11, 12, 13, 14]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def inputs_of(
    tokens: list[int], slots: list[int], positions: list[int], rows: list[int]
) -> tuple[list[int], list[int]]:
    batch = DecodeBatch(ints(*rows), ints(*POSITIONS), ints())
    out = torch.full((2, len(tokens)), -7, dtype=torch.int64, device=DEVICE)
    row_inputs(ints(*tokens), ints(*slots), ints(*positions), batch, ints(*LAST_TOKEN), *out)
    return out[0].tolist(), out[1].tolist()


def test_decode_rows_have_the_last_token_and_the_position_of_their_slot() -> None:
    alone = [-1] * 4
    assert inputs_of(alone, alone, alone, [3, 0, -1, -1]) == ([103, 100, 0, 0], [13, 10, 0, 0])


def test_chunk_rows_have_their_own_and_padding_has_none() -> None:
    tokens, slots, positions = [-1, -1, 7, 8, 0, 0], [-1, -1, 2, 2, -1, -1], [9, 9, 4, 5, 99, -3]
    for rows in ([4, 1], [4, 1, -1, -1]):
        found = inputs_of(tokens, slots, positions, rows)
        assert found == ([104, 101, 7, 8, 0, 0], [14, 11, 4, 5, 0, 0])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 24), (4, 4, 32)])
def test_heads_of_any_strides_and_width_are_packed(heads: int, kv_heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    for dtype in DTYPES:

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

        query = random(heads, 3, dim).transpose(0, 1)
        key = random(3, kv_heads, 2 * dim)[:, :, dim:]
        value = random(3, dim, kv_heads).transpose(1, 2)
        out = torch.full((3, heads + 2 * kv_heads, dim), 9.0, dtype=dtype, device=DEVICE)
        pack_heads(query, key, value, out)
        assert torch.equal(out, torch.cat((query, key, value), 1))
