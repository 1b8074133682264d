"""Load with the OpenAI Python SDK; a script that needs the SDK and nothing of ours.

    ENVIRONMENT/bin/python loadtest/studies/foreign/openai_sdk.py \\
        --base-url http://127.0.0.1:8000 --model penstock-tiny --prompts prompts.jsonl \\
        --concurrency 8 --output-len 64 --output result.json

``prompts.jsonl`` has one JSON string a line. Times are taken where an application would take them:
around the SDK's own calls and iterators. With ``--request-rate`` requests arrive at random instead
of in a closed loop.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

WARMUP = "Say something first."


class Answer(NamedTuple):
    """One answer. Times in seconds from sending the request."""

    ttft: float
    """First chunk with content."""
    latency: float
    """Last chunk with a choice; usage comes after it."""
    prompt_tokens: int
    output_tokens: int


async def ask(client: Any, model: str, prompt: str, output_len: int) -> Answer:
    """Stream one answer. Raises what the SDK raises, and ``ValueError`` for an incomplete one."""
    began = time.perf_counter()
    first = last = None
    usage = None
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=output_len,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices:
            last = time.perf_counter()
            if first is None and chunk.choices[0].delta.content:
                first = last
        usage = chunk.usage or usage
    if first is None or last is None or usage is None:
        raise ValueError("the answer ended without content or without usage")
    return Answer(first - began, last - began, usage.prompt_tokens, usage.completion_tokens)


class Load:
    """One run over the prompts; keeps what was answered and what failed."""

    def __init__(self, client: Any, model: str, prompts: list[str], output_len: int) -> None:
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self.seconds = 0.0
        self._client = client
        self._model = model
        self._prompts = prompts
        self._output_len = output_len

    async def _ask(self, prompt: str) -> None:
        try:
            self.answers.append(await ask(self._client, self._model, prompt, self._output_len))
        except Exception as error:  # whatever the SDK raises is a failed request
            self.failures.append(f"{type(error).__name__}: {error}")

    async def closed_loop(self, concurrency: int) -> None:
        """Each of ``concurrency`` lanes sends its next request when its answer has ended."""
        waiting: Iterator[str] = iter(self._prompts)

        async def lane() -> None:
            for prompt in waiting:
                await self._ask(prompt)

        began = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(concurrency)))
        self.seconds = time.perf_counter() - began

    async def poisson(self, rate: float, seed: int) -> None:
        """Requests at exponential gaps of ``1 / rate`` seconds in the mean."""
        draw = random.Random(seed)
        began = due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in self._prompts:
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._ask(prompt))
                due += draw.expovariate(rate)
        self.seconds = time.perf_counter() - began


def summary(load: Load) -> dict[str, Any]:
    """The run's figures under the names of ``penstock bench serve``."""
    answers = load.answers
    ttft = [answer.ttft * 1e3 for answer in answers]
    tpot = [
        (answer.latency - answer.ttft) * 1e3 / (answer.output_tokens - 1)
        for answer in answers
        if answer.output_tokens > 1
    ]
    output_tokens = sum(answer.output_tokens for answer in answers)
    return {
        "completed": len(answers),
        "failed": len(load.failures),
        "failures": load.failures[:3],
        "duration": load.seconds,
        "total_input_tokens": sum(answer.prompt_tokens for answer in answers),
        "total_output_tokens": output_tokens,
        "request_throughput": len(answers) / load.seconds,
        "output_throughput": output_tokens / load.seconds,
        "mean_ttft_ms": statistics.fmean(ttft) if ttft else None,
        "median_ttft_ms": statistics.median(ttft) if ttft else None,
        "mean_tpot_ms": statistics.fmean(tpot) if tpot else None,
        "median_tpot_ms": statistics.median(tpot) if tpot else None,
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    openai: Any = importlib.import_module("openai")  # lives in this script's environment only
    prompts = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    url = options.base_url.rstrip("/") + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        warmup = Load(client, options.model, [WARMUP] * options.concurrency, 8)
        await warmup.closed_loop(options.concurrency)
        load = Load(client, options.model, prompts, options.output_len)
        if options.request_rate:
            await load.poisson(options.request_rate, options.seed)
        else:
            await load.closed_loop(options.concurrency)
        return summary(load)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--request-rate", type=float, help="default: a closed loop")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    result = asyncio.run(run(options))
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    for message in result["failures"]:
        print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
