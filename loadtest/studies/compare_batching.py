"""Tokens per second of a model computed by transformers' code: in Penstock, and in transformers'
own continuous batching, in turns in one run.

    python -m penstock.loadtest.studies.compare_batching \\
        --folder FOLDER --device cuda --load-format dummy

Both hold their model from the beginning, so neither side's loading, compilation or capture of
graphs counts: each answers the same prompts once before the rounds. A side that does not answer
within ``--limit`` seconds ends the run with what is known by then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)

import penstock

Prompts = list[list[int]]
_POLL_SECONDS = 0.5


class TooSlow(Exception):
    """A side has not answered within the limit."""


class Transformers:
    """Its continuous batching, greedy, with its own defaults but for the memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        dtype, device = getattr(torch, options.dtype), torch.device(options.device)
        attention = options.attention or "sdpa"
        if options.load_format == "dummy":
            config = AutoConfig.from_pretrained(options.folder)
            make: Any = AutoModelForCausalLM.from_config
            with torch.device(device):
                model: Any = make(config, dtype=dtype, attn_implementation=attention)
        else:
            read: Any = AutoModelForCausalLM.from_pretrained
            model = read(options.folder, dtype=dtype, attn_implementation=attention).to(device)
        self._model = model.eval()
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=options.output_len, eos_token_id=-1, pad_token_id=0
        )
        memory = ContinuousBatchingConfig(
            max_memory_percent=options.memory_share, allow_block_sharing=False
        )
        with torch.no_grad():
            self._manager = self._model.init_continuous_batching(
                generation_config=settings, continuous_batching_config=memory
            )
            self._manager.warmup()
        self._manager.start()

    def seconds(self, prompts: Prompts, tokens: int, limit: float) -> float:
        began = time.perf_counter()
        wanted = set(self._manager.add_requests(prompts, max_new_tokens=tokens))
        while wanted:
            if time.perf_counter() - began > limit:
                raise TooSlow(f"transformers: {len(wanted)} of {len(prompts)} are not answered")
            result = self._manager.get_result(timeout=_POLL_SECONDS)
            if result is None or not result.is_finished():
                continue
            if result.error or len(result.generated_tokens) != tokens:
                raise RuntimeError(f"{len(result.generated_tokens)} of {tokens}: {result.error}")
            wanted.discard(result.request_id)
        return time.perf_counter() - began

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


class Ours:
    """The library, all its processes, with the same modelling code."""

    def __init__(self, options: argparse.Namespace) -> None:
        share = {"gpu_memory_utilization": options.memory_share} if options.device == "cuda" else {}
        self._llm = penstock.LLM(
            str(options.folder),
            device=options.device,
            dtype=options.dtype,
            load_format=options.load_format,
            model_impl="transformers",
            max_num_seqs=options.requests,
            enable_prefix_caching=False,
            **share,
        )

    def seconds(self, prompts: Prompts, tokens: int, limit: float) -> float:
        params = penstock.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        answers = self._llm.generate(prompts, params, progress=False, deadline_s=limit)
        taken = time.perf_counter() - began
        if any(len(answer.outputs[0].token_ids) != tokens for answer in answers):
            raise TooSlow("Penstock: not all are answered")
        return taken

    def close(self) -> None:
        self._llm.close()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of both sides, and their ratio round by round."""
    random = np.random.default_rng(0)
    vocabulary = AutoConfig.from_pretrained(options.folder).vocab_size
    shape = (options.requests, options.input_len)
    prompts = random.integers(3, min(4000, vocabulary), shape).tolist()
    sides: dict[str, Ours | Transformers] = {
        "penstock": Ours(options),
        "transformers": Transformers(options),
    }
    count = options.requests * options.output_len
    rates: dict[str, list[float]] = {name: [] for name in sides}
    problem = ""
    try:
        for number in range(options.rounds + 1):
            for name, side in sides.items():
                rate = count / side.seconds(prompts, options.output_len, options.limit)
                print(f"round {number}, {name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
                if number:  # the first one warms up
                    rates[name].append(rate)
    except TooSlow as failure:
        problem = str(failure)
    finally:
        for side in sides.values():
            side.close()
    ratios = sorted(a / b for a, b in zip(*rates.values(), strict=False))
    return {
        "device": options.device,
        "dtype": options.dtype,
        "requests": options.requests,
        "tokens": [options.input_len, options.output_len],
        **{f"{name}_tokens_per_s": [round(rate, 1) for rate in rates[name]] for name in sides},
        "ratio": round(statistics.median(ratios), 2) if ratios else None,
        "ratio_spread": [round(ratios[0], 2), round(ratios[-1], 2)] if ratios else None,
        **({"problem": problem} if problem else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--attention", help="of transformers; sdpa unless given")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-share", type=float, default=0.4, help="of a GPU, for each side")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one batch")
    print(json.dumps(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
