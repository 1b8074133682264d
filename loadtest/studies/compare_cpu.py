"""Tokens per second of the library beside transformers' `generate`, interleaved in one run.

    python -m penstock.loadtest.studies.compare_cpu --model tiny
    python -m penstock.loadtest.studies.compare_cpu --model 0.6b --rounds 3 --tokens 32
    python -m penstock.loadtest.studies.compare_cpu \\
        --folder CHECKPOINT --prompt 1900 --tokens 1 --batch 1

Both take the same checkpoint, a random one or one that is given, and the same prompts. The library
chooses its threads itself; `generate` runs with each number of threads of
``--transformers-threads`` and its better one counts. Each round runs all of them one after the
other, so that what else the machine does meets them all; the ratio is taken round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import penstock
from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.models.model_sizes import SIZES

PROMPT = 32
SETTLE_SECONDS = 10.0
"""All processes of the library start at once, and its worker measures threads again after that."""


class Transformers:
    """`generate` on a static batch, greedy."""

    def __init__(self, folder: Path, dtype: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None

    def tokens_per_second(self, prompts: list[list[int]], tokens: int, threads: int) -> float:
        torch.set_num_threads(threads)
        ids = torch.tensor(prompts)
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0
        )
        began = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
        return len(prompts) * tokens / (time.perf_counter() - began)


class Ours:
    """The library, all its processes."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.llm = penstock.LLM(str(folder), device="cpu", dtype=dtype, enable_prefix_caching=False)
        time.sleep(SETTLE_SECONDS)

    def tokens_per_second(self, prompts: list[list[int]], tokens: int) -> float:
        params = penstock.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        self.llm.generate(prompts, params, progress=False)
        return len(prompts) * tokens / (time.perf_counter() - began)


def compare(
    folder: Path,
    dtype: str,
    batches: list[int],
    rounds: int,
    tokens: int,
    threads: list[int],
    length: int = PROMPT,
) -> list[dict[str, Any]]:
    """length: tokens of a prompt."""
    ours, theirs = Ours(folder, dtype), Transformers(folder, dtype)
    random = np.random.default_rng(0)
    rows = []
    for batch in batches:
        prompts = random.integers(3, 4000, (batch, length)).tolist()
        warm = min(tokens, 4)
        ours.tokens_per_second(prompts, warm)
        for count in threads:
            theirs.tokens_per_second(prompts, warm, count)
        own: list[float] = []
        other: dict[int, list[float]] = {count: [] for count in threads}
        for _ in range(rounds):
            own.append(ours.tokens_per_second(prompts, tokens))
            for count in threads:
                other[count].append(theirs.tokens_per_second(prompts, tokens, count))
        best = max(threads, key=lambda count: statistics.median(other[count]))
        ratios = sorted(a / b for a, b in zip(own, other[best], strict=True))
        rows.append(
            {
                "dtype": dtype,
                "batch": batch,
                "prompt": length,
                "tokens": tokens,
                "penstock_tokens_per_s": round(statistics.median(own), 2),
                "transformers_tokens_per_s": {
                    count: round(statistics.median(values), 2) for count, values in other.items()
                },
                "ratio": round(statistics.median(ratios), 2),
                "ratio_spread": [round(ratios[0], 2), round(ratios[-1], 2)],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    ours.llm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--folder", type=Path, help="of a checkpoint, instead of a random model")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    cores = psutil.cpu_count(logical=False) or 1
    parser.add_argument("--transformers-threads", nargs="+", type=int, default=sorted({1, cores}))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for dtype in options.dtype:
            folder = options.folder
            if folder is None:
                folder = make_model(Path(place) / dtype, dtype=dtype, **SIZES[options.model])
            compare(
                folder,
                dtype,
                options.batch,
                options.rounds,
                options.tokens,
                options.transformers_threads,
                options.prompt,
            )


if __name__ == "__main__":
    main()
