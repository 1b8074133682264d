"""A server under requests of random sizes and settings, until it has made so many steps, and the
memory that its GPU has in use meanwhile.

    python -m penstock.loadtest.studies.random_load MODEL --steps 10000 -- --device cuda \
        --gpu-memory-utilization 0.95

Starts the server with the flags behind ``--``. Every request must be answered in full: an
allocation that fails in a step would show as an error or as a failed step. The result is one line
of JSON, the exit code 1 where a request or a step failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from typing import Any

import aiohttp

from penstock.loadtest.own_server import own_server
from penstock.loadtest.studies.gpu_memory import memory_in_use
from penstock.protocol.model_info import read_model_info

_SAMPLE_SECONDS = 2.0
_LONGEST_REQUEST_S = 300.0
_METRIC = re.compile(r"^penstock_(steps_total|failed_steps_total)(?:\{[^}]*\})? ([0-9.e+]+)", re.M)
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"temperature": 1.0, "presence_penalty": 0.5, "logprobs": 5},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.1, "typical_p": 0.9, "xtc_probability": 0.5, "sampler_order": ["xtc"]},
    {"temperature": 0.9, "mirostat_mode": 2, "dry_multiplier": 0.8, "tfs": 0.95},
    {"temperature": 0, "prompt_logprobs": 2},
)


def random_body(choose: random.Random, model: str, longest: int, vocabulary: int) -> dict[str, Any]:
    """A completion of 1 to ``longest`` tokens in; one in eight prompts continues a shared one."""
    length = min(longest, max(1, int(choose.expovariate(1 / (longest / 6)))))
    shared = choose.random() < 0.125
    ids = random.Random(0 if shared else choose.random())
    prompt = [ids.randrange(3, vocabulary) for _ in range(length)]
    tokens = choose.choice((1, 8, 32, 128, 256))
    sizes = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
    return {"model": model, "prompt": prompt, **sizes, **choose.choice(_SETTINGS)}


class Load:
    """Requests, ``clients`` at once, and what came of them."""

    def __init__(self, session: aiohttp.ClientSession, options: argparse.Namespace) -> None:
        self._session, self._options = session, options
        self._choose = random.Random(options.seed)
        self._done = False
        self._began = time.monotonic()
        self.answered = 0
        self.failures: list[str] = []
        self.memory: list[int] = []
        self.steps: dict[str, float] = {}

    async def run(self) -> None:
        async with self._session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]
        longest = min(self._options.longest, model["max_model_len"] - 256)
        clients = [self._client(model["id"], longest) for _ in range(self._options.clients)]
        await asyncio.gather(self._watch(), *clients)

    async def _client(self, model: str, longest: int) -> None:
        while not self._done:
            body = random_body(self._choose, model, longest, self._options.vocabulary)
            try:
                async with self._session.post("/v1/completions", json=body) as answer:
                    found = await answer.json()
                    if answer.status != 200:
                        raise ValueError(f"{answer.status}: {found}"[:300])
                wanted = body["max_tokens"] * body.get("n", 1)
                if found["usage"]["completion_tokens"] != wanted:
                    raise ValueError(f"{found['usage']} instead of {wanted} tokens")
                self.answered += 1
            except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
                self.failures.append(repr(failure))
                self._done = len(self.failures) > self._options.clients

    async def _watch(self) -> None:
        while not self._done:
            self.memory += (await asyncio.to_thread(memory_in_use))[:1]
            async with self._session.get("/metrics") as answer:
                found = _METRIC.findall(await answer.text())
            self.steps = {name: sum(float(v) for n, v in found if n == name) for name, _ in found}
            self._done |= self.steps.get("steps_total", 0) >= self._options.steps
            if not self._done and time.monotonic() - self._began > self._options.limit:
                self.failures.append(f"{self.steps} after {self._options.limit:g} s")
                self._done = True
            await asyncio.sleep(0 if self._done else _SAMPLE_SECONDS)


async def under_load(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Load the server at ``url``; the result."""
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_LONGEST_REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        load = Load(session, options)
        await load.run()
    memory = load.memory
    return {
        "steps": int(load.steps.get("steps_total", 0)),
        "failed_steps": int(load.steps.get("failed_steps_total", 0)),
        "requests": load.answered,
        "failures": load.failures[:5],
        "seconds": round(time.monotonic() - began, 1),
        "memory_mib": {"first": memory[0], "least": min(memory), "most": max(memory)}
        if memory
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a prompt")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that it may take")
    parser.add_argument("--seed", type=int, default=0)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    options.vocabulary = read_model_info(options.model).vocab_size
    account: list[str] = []

    def told(line: str) -> None:
        if '"memory' in line:
            account.append(json.loads(line)["event"])

    with own_server([options.model, *sys.argv[end + 1 :]], on_line=told) as url:
        found = asyncio.run(under_load(url, options))
    print(json.dumps({**found, "account": account}))
    sys.exit(1 if found["failures"] or found["failed_steps"] else 0)


if __name__ == "__main__":
    main()
