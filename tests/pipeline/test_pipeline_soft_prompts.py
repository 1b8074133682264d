"""Soft prompts in whole servers that keep KV blocks, hand requests over, and round numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.chaos.victims import find
from support.pipeline.adapter_folders import ROWS, write_soft_prompt
from support.pipeline.served import BUILT_IN, Served, served
from test_pipeline_kv_tiers import ask, metric_reaches, times_killed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VIRTUAL, HIDDEN = 23, 256
NAMES = ("soft", "penstock-demo")
PROMPTS = [[(7 * i + 13 * k) % 200 + 5 for i in range(300)] for k in range(2)]
MEMORY = ("--kv-tier-memory-bytes", str(64 << 20))
ROLES = (
    *("--prefill-engines", "1", "--decode-engines", "1", "--max-local-prefill-length", "64"),
    *(*MEMORY, "--num-kv-blocks", "256"),
)
ROUNDED = ("--quantization", "int8", "--kv-cache-dtype", "int8")
Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    rows = 2 * torch.randn(VIRTUAL, HIDDEN, generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("adapters") / "soft"
    write_soft_prompt(folder, VIRTUAL, HIDDEN, tensors={ROWS: rows})
    found = [*BUILT_IN, "--max-model-len", "512", "--lora", f"soft={folder}"]
    return lambda *more: [*found, *more]


def ask_all(server: Served, tokens: int = 12) -> tuple[list[str], list[int]]:
    """Texts, and tokens that were cached, of each prompt with each name."""
    answers = [
        ask(server, prompt, model=name, max_tokens=tokens, ignore_eos=True)
        for prompt in PROMPTS
        for name in NAMES
    ]
    return [text for text, _ in answers], [cached for _, cached in answers]


def texts_of(flags: list[str], tokens: int = 12) -> list[str]:
    """Where nothing is kept."""
    with served(*flags, "--num-kv-blocks", "64", "--no-enable-prefix-caching") as plain:
        texts, _ = ask_all(plain, tokens)
    for soft, base in zip(texts[::2], texts[1::2], strict=True):
        assert soft != base
    return texts


@pytest.mark.parametrize("kind", [(), ROUNDED], ids=["float32", "int8"])
def test_texts_are_the_same_from_memory_and_from_disk(
    kind: tuple[str, ...], flags: Flags, tmp_path: Path
) -> None:
    """Of 323 positions 320 are in whole blocks, which begin with 23 virtual tokens."""
    texts = texts_of(flags(*kind))
    found = [297, 288] * 2
    room = ("--num-kv-blocks", "40", "--kv-tier-disk", str(tmp_path / "kv"))
    kept = flags(*kind, *MEMORY, *room)
    with served(*kept) as server:
        for _ in range(2):
            assert ask_all(server)[0] == texts
        assert ask_all(server) == (texts, found)
        metric_reaches(server, "penstock_kv_tier_hit_blocks_total", 4 * 18)
    with served(*kept) as server:
        assert ask_all(server) == (texts, found)


@pytest.mark.parametrize("kind", [(), ROUNDED], ids=["float32", "int8"])
def test_texts_are_the_same_when_another_engine_goes_on_with_them(
    kind: tuple[str, ...], flags: Flags
) -> None:
    texts = texts_of(flags(*kind), 90)
    with served(*flags(*kind, *ROLES)) as server:
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(ask_all, server, 90) for _ in range(3)]
            assert [one.result()[0] for one in asked] == [texts] * 3
        metric_reaches(server, "penstock_hand_overs_total", 1)


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["worker 0", "worker 1", "scheduler 1", "keeper 0"])
def test_a_kill_while_they_are_handed_over_costs_no_request_and_no_text(
    victim: str, flags: Flags
) -> None:
    texts = texts_of(flags(), 90)
    role, _, number = victim.partition(" ")
    with served(*flags(*ROLES)) as server, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask_all, server, 90) for _ in range(2)]
        metric_reaches(server, "penstock_hand_overs_total", 1)
        find(server, role, int(number)).kill()
        assert [one.result()[0] for one in asked] == [texts] * 2
        assert ask_all(server, 90)[0] == texts
        assert times_killed(server, role) or f"{victim} was killed by SIGKILL" in server.output
