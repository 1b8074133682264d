"""The estimates for several GPUs beside what docs/benchmarks.md measured of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_worker_roofline import PAGE, STEP, B, decode_ms, engine, numbers, w1

from penstock.services.worker.gpus import GPUS
from penstock.services.worker.layouts.roofline import EngineCost, rates_of
from penstock.services.worker.models.rank_shares import most_peer_bytes

PLANNING = (Path(__file__).resolve().parents[3] / "docs/planning.md").read_text()
FACTOR = 1.15
"""As docs/planning.md says."""
PROMPT, ANSWER = 128, 256
"""Tokens of the calls of which the page has the milliseconds a token."""
TENSOR, PIPELINE, DATA = (f"--{each}-parallel-size" for each in ("tensor", "pipeline", "data"))
LAYOUTS = {
    "B, one GPU": (B, {}),
    f"B, `{TENSOR} 2`": (B, {"tensor": 2}),
    f"B, `{TENSOR} 4`": (B, {"tensor": 4}),
    f"B, `{PIPELINE} 2`": (B, {"pipeline": 2}),
    f"B, `{DATA} 2`": (B, {"data": 2}),
    f"B, `{DATA} 4`": (B, {"data": 4}),
    "32B, one GPU": ("32B", {}),
    f"32B, `{TENSOR} 2`": ("32B", {"tensor": 2}),
    f"32B, `{TENSOR} 4`": ("32B", {"tensor": 4}),
}
"""By the first cell of their row in both pages; what is not named is 1."""
MEASURED = PAGE[PAGE.index("| model, layout | W1, output tokens/s |") :]


def token_ms(cost: EngineCost, batch: int) -> float:
    """Of a call: its prompts and all tokens of its answers."""
    tokens = batch * PROMPT
    prompts = tokens * cost.prefill_seconds(PROMPT, STEP)
    if tokens < STEP:
        prompts = cost.prompt_seconds(tokens, STEP)
    return (1e3 * prompts + (ANSWER - 1) * decode_ms(cost, batch, PROMPT + ANSWER / 2)) / ANSWER


def compared(name: str) -> list[tuple[float, float] | None]:
    """Estimate and measured figure of W1 and of a token at batch 1, 8 and 64, if measured."""
    found = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", MEASURED, re.MULTILINE)
    assert found, f"docs/benchmarks.md has no row {name}"
    rate, _, *tokens = (cell.strip() for cell in found[1].split("|"))
    model, sizes = LAYOUTS[name]
    tensor, pipeline = sizes.get("tensor", 1), sizes.get("pipeline", 1)
    cost = engine(model, "h100", compress="never", tensor=tensor, pipeline=pipeline).cost
    figures: list[tuple[float, float] | None] = [None]
    if rate[0].isdigit():
        figures = [(sizes.get("data", 1) * w1(cost), numbers(rate)[0])]
    for batch, cell in zip((1, 8, 64), tokens, strict=True):
        figures.append((token_ms(cost, batch), numbers(cell)[0]) if cell else None)
    return figures


def shown(name: str) -> str:
    """The row of docs/planning.md."""
    rate, *tokens = compared(name)
    cells = [f"{rate[0]:,.0f} / {rate[1]:,.0f}" if rate else ""]
    cells += [f"{one[0]:.2f} / {one[1]:.2f}" if one else "" for one in tokens]
    return f"| {name} | {' | '.join(cells)} |".replace("  |", " |")


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_estimate_for_several_gpus_is_near_what_was_measured(name: str) -> None:
    for figures in filter(None, compared(name)):
        assert 1 / FACTOR <= figures[0] / figures[1] <= FACTOR, figures


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_page_shows_the_estimates_as_they_are(name: str) -> None:
    assert shown(name) in PLANNING.splitlines(), shown(name)


def test_few_rows_are_summed_over_peer_memory_unless_nccl_is_asked_for() -> None:
    fast, nccl = (rates_of(GPUS["h100"], peer=peer) for peer in (True, False))
    most = most_peer_bytes(2)
    assert fast.all_reduce(8192, 2) < nccl.all_reduce(8192, 2) / 1.5
    assert fast.all_reduce(most, 2) < nccl.all_reduce(most, 2)
    assert fast.all_reduce(most + 1, 2) == nccl.all_reduce(most + 1, 2)


def test_an_all_reduce_takes_what_the_study_of_it_measured_between_two_gpus() -> None:
    """Sums alone, in graphs; in a step ranks also wait for each other."""
    table = PAGE[PAGE.index("studies.all_reduce --ranks 2\n") :]
    rows = re.findall(r"^\| (\d+) (KiB|MiB) \| ([\d.]+) \| ([\d.]+) \|", table, re.MULTILINE)[:4]
    nccl, peer = (rates_of(GPUS["h100"], peer=peer) for peer in (False, True))
    assert [f"{count} {unit}" for count, unit, *_ in rows] == [
        "8 KiB",
        "64 KiB",
        "256 KiB",
        "1 MiB",
    ]
    for count, unit, ours, theirs in rows:
        size = int(count) << (20 if unit == "MiB" else 10)
        assert 1e6 * nccl.all_reduce(size, 2) == pytest.approx(float(theirs), rel=0.15)
        assert 0 < 1e6 * peer.all_reduce(size, 2) - float(ours) < 2.5
