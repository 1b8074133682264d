"""The table of docs/models.md: what attends on which card, for which type and head size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from penstock.kernels.gpu import decode_attention_hopper as decode
from penstock.kernels.gpu import prefill_attention_hopper as prefill
from penstock.kernels.gpu import shared_prefix_hopper as prefix
from penstock.kernels.gpu.device_facts import facts_of
from penstock.kernels.gpu.prefill_attention import shape_for
from penstock.services.worker.gpu.kernel_choice import HOPPER
from penstock.services.worker.models.dense import paged_config
from penstock.services.worker.models.specification import CacheSpecification

PAGE = (Path(__file__).resolve().parents[3] / "docs/models.md").read_text()
BLOCK, SHARED, ROWS = 16, 16, 256
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CARDS = {"9.0", "10.0", "8.0", "8.6", "8.9", "12.0"}
HEADS = {
    "128": (128,),
    "64": (64,),
    "other even sizes to 256": (2, 32, 66, 80, 96, 112, 130, 192, 256),
    "even sizes to 256": (2, 64, 80, 128, 130, 256),
    "even sizes to 128": (2, 64, 80, 128),
    "even sizes from 130 on": (130, 192, 256, 320),
    "odd sizes, more than 256": (1, 79, 255, 258, 320),
}


def paths(capability: tuple[int, int], dtype: torch.dtype, dim: int) -> list[str]:
    """Of prefill, decode and shared prefixes: as a worker chooses them."""
    form = paged_config([CacheSpecification(2, dim, 2 * SHARED)], 64, 64, 100)
    fits = shape_for(dim, dtype.itemsize, facts_of(capability).shared_bytes)
    if isinstance(form, str) or fits is None:
        return ["torch"] * 3
    if capability != HOPPER:
        return ["Triton"] * 3
    reasons = (
        prefill.why_not(dtype, dim, BLOCK),
        decode.why_not(dtype, dim, BLOCK, SHARED, ROWS),
        prefix.why_not(dtype, dim, BLOCK, SHARED),
    )
    return ["Triton" if reason else "Hopper" for reason in reasons]


def rows() -> list[list[str]]:
    table = PAGE[PAGE.index("| card | type | heads |") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[2:]]


def cards_of(cell: str) -> set[str]:
    return CARDS if cell == "all" else set(re.findall(r"\d+\.\d", cell))


def test_the_table_says_what_a_worker_chooses() -> None:
    for card, types, heads, *said in rows():
        for one in cards_of(card):
            major, minor = map(int, one.split("."))
            for name in TYPES if types == "any" else types.split(", "):
                for dim in HEADS[heads]:
                    assert paths((major, minor), TYPES[name], dim) == said, (one, name, dim)


def test_the_table_has_every_card_and_type() -> None:
    known = {
        (one, name)
        for card, types, *_ in rows()
        for one in cards_of(card)
        for name in (TYPES if types == "any" else types.split(", "))
        if card != "all"
    }
    assert known == {(one, name) for one in CARDS for name in TYPES}
