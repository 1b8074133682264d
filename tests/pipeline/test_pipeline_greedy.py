"""Greedy output is what transformers chooses, token for token, in float32 on the CPU."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest
from support.pipeline.clients import Answer, ask
from support.pipeline.reference_models import ids_of, transformers_choices, write_model
from support.pipeline.served import served

NUM_PROMPTS = 64
NEW_TOKENS = 64
BLOCK = 16


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """64 prompts of 1 to 700 tokens, short ones first; some share long beginnings.

    The 48 short ones start within a few steps, whatever the token budget, and together they grow
    beyond a quarter of the memory.
    """
    rng = random.Random(5)

    def ids(count: int) -> list[int]:
        return [rng.randrange(320) for _ in range(count)]

    common = ids(300)
    short = [[7], *(ids(rng.randrange(1, 16)) for _ in range(47))]
    long = [common + ids(rng.randrange(1, 400)) for _ in range(6)]
    long += [ids(rng.randrange(16, 400)) for _ in range(NUM_PROMPTS - len(short) - 7)]
    rng.shuffle(long)
    return [*short, *long, ids(700)]


async def ask_all(url: str, prompts: list[list[int]]) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=110)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(
            *(
                ask(
                    session,
                    url,
                    {
                        "prompt": prompt,
                        "max_tokens": NEW_TOKENS,
                        "temperature": 0,
                        "ignore_eos": True,
                        "stream": number % 2 == 0,
                    },
                )
                for number, prompt in enumerate(prompts)
            )
        )


@pytest.mark.parametrize(
    ("architecture", "budget", "caching", "memory"),
    [
        ("qwen3", 64, False, "quarter"),
        pytest.param("qwen3", 256, True, "all", marks=pytest.mark.slow),
        pytest.param("qwen3", 2048, True, "all", marks=pytest.mark.slow),
        pytest.param("qwen2", 64, True, "all", marks=pytest.mark.slow),
        pytest.param("qwen2", 256, True, "quarter", marks=pytest.mark.slow),
        pytest.param("qwen2", 2048, False, "quarter", marks=pytest.mark.slow),
        pytest.param("llama", 64, True, "all", marks=pytest.mark.slow),
        pytest.param("llama", 256, False, "quarter", marks=pytest.mark.slow),
        pytest.param("llama", 2048, False, "all", marks=pytest.mark.slow),
        pytest.param("gemma3", 256, True, "quarter", marks=pytest.mark.slow),
        pytest.param("gemma3", 64, False, "all", marks=pytest.mark.slow),
        pytest.param("gpt-neox", 256, True, "quarter", marks=pytest.mark.slow),
    ],
)
def test_64_concurrent_prompts_give_what_transformers_gives(
    tmp_path: Path,
    prompts: list[list[int]],
    architecture: str,
    budget: int,
    caching: bool,
    memory: str,
) -> None:
    folder = write_model(architecture, tmp_path / "model")
    blocks = sum(-(-(len(prompt) + NEW_TOKENS) // BLOCK) for prompt in prompts)
    if architecture == "gemma3":
        blocks *= 2  # two groups of layers
    if memory == "quarter":
        blocks //= 4
    with served(
        str(folder),
        "--device", "cpu",
        "--dtype", "float32",
        "--max-num-seqs", "64",
        "--max-num-batched-tokens", str(budget),
        "--block-size", str(BLOCK),
        "--num-kv-blocks", str(blocks),
        "--enable-prefix-caching" if caching else "--no-enable-prefix-caching",
        # All requests wait before the first step, however slowly they arrive.
        "--fault", "scheduler:sleep=1@Enqueue=1",
    ) as server:  # fmt: skip
        answers = asyncio.run(ask_all(server.url, prompts))
        metrics = server.settled()
        assert "quantized" not in server.output
    for answer in answers:
        assert answer.error is None, answer.error
        assert answer.done
        assert answer.finish[0] == "length"
    outputs = [ids_of(answer.text[0]) for answer in answers]
    expected = transformers_choices(folder, prompts, outputs)
    for prompt, output, wanted in zip(prompts, outputs, expected, strict=True):
        assert len(output) == NEW_TOKENS
        assert output == wanted, f"prompt of {len(prompt)} tokens"
    preempted = metrics["penstock_preemptions_total"]
    assert preempted > 0 if memory == "quarter" else preempted == 0
    hits = metrics["penstock_prefix_cache_hit_tokens_total"]
    assert hits > 0 if caching else hits == 0
