"""How each tool is told the same load, and where its result has our figures.

Names differ: what guidellm and aiperf call inter-token latency is the time after the first chunk
divided by tokens - 1, our TPOT. (Our ITL is between chunks. guidellm's own TPOT counts the time
to the first token too.)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.client.prompts import RandomShape, random_prompts

TOKENIZER = "penstock/benchmarked"
"""The served model's tokenizer as guidellm and aiperf find it, see ``offline_cache``."""
RESULT = "result.json"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop on the chat endpoint, or arrivals at random; streamed, past the end token."""

    base_url: str
    model: str
    words: int
    """Words of a prompt that make about ``input_len`` tokens: where text is drawn by us."""
    requests: int = 64
    concurrency: int = 8
    """Requests at once, in the closed loop and in the warm-up before it."""
    request_rate: float | None = None
    """Poisson arrivals a second, without a limit of concurrency; None: the closed loop."""
    input_len: int = 128
    """Tokens of a prompt, the chat template's not counted."""
    output_len: int = 64
    seed: int = 0
    """Another one for each run: prompts that the server has seen are cached."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a tool reported. Lengths are means over the answers."""

    completed: int
    failed: int
    input_len: float
    output_len: float
    requests_per_s: float
    output_tokens_per_s: float
    mean_ttft_ms: float
    mean_tpot_ms: float
    median_ttft_ms: float
    median_tpot_ms: float
    failures: str = ""
    """What the tool says of those that failed, where it says it request by request."""


class Tool(msgspec.Struct, frozen=True):
    name: str
    package: str
    """Its distribution; empty: it is a part of this one."""
    command: Callable[[Load, Path], list[str]]
    """The command line, to be run in a folder of its own; its second argument is the folder of
    the environment's executables."""
    prepare: Callable[[Load, Path], None]
    """Writes what the command reads into the run's folder."""
    read: Callable[[Path], Figures]
    """Reads the run's folder. Raises ``OSError``, ``KeyError`` or ``ValueError``."""


def offline_cache(folder: Path, tokenizer: Path) -> Path:
    """A Hugging Face cache in ``folder`` that has the folder ``tokenizer`` as ``TOKENIZER``.

    aiperf 0.13 takes no path under HF_HUB_OFFLINE=1, only names in the cache. The layout is that
    of huggingface_hub: ``models--OWNER--NAME/refs/main`` names a folder in ``snapshots``.
    """
    revision = "0" * 40
    entry = folder / f"models--{TOKENIZER.replace('/', '--')}"
    for part in ("refs", "snapshots"):
        (entry / part).mkdir(parents=True, exist_ok=True)
    (entry / "refs" / "main").write_text(revision)
    (entry / "snapshots" / revision).symlink_to(tokenizer.resolve())
    return folder


def _nothing(load: Load, folder: Path) -> None:
    """The tool makes its own prompts."""


def _our_command(load: Load, binaries: Path) -> list[str]:
    pace = (
        ["--request-rate", str(load.request_rate)]
        if load.request_rate
        else ["--max-concurrency", str(load.concurrency)]
    )
    return [
        sys.executable, "-m", "penstock.services", "bench", "serve", "--base-url", load.base_url,
        "--endpoint", "/v1/chat/completions", "--model", load.model,
        "--num-prompts", str(load.requests), *pace,
        "--random-input-len", str(load.words), "--random-output-len", str(load.output_len),
        "--ignore-eos", "--warmup-requests", str(load.concurrency), "--seed", str(load.seed),
        "--save-result", RESULT, "--quiet",
    ]  # fmt: skip


def _our_figures(folder: Path) -> Figures:
    result = json.loads((folder / RESULT).read_text())
    completed = result["completed"]
    return Figures(
        completed=completed,
        failed=result["failed"],
        input_len=result["total_input_tokens"] / max(1, completed),
        output_len=result["total_output_tokens"] / max(1, completed),
        requests_per_s=result["request_throughput"],
        output_tokens_per_s=result["output_throughput"],
        mean_ttft_ms=result["mean_ttft_ms"],
        mean_tpot_ms=result["mean_tpot_ms"],
        median_ttft_ms=result["median_ttft_ms"],
        median_tpot_ms=result["median_tpot_ms"],
    )


def _guidellm_command(load: Load, binaries: Path) -> list[str]:
    """It asks for ``ignore_eos`` by itself wherever a data set has output lengths."""
    data = f"prompt_tokens={load.input_len},output_tokens={load.output_len}"
    pace = (
        f"kind=poisson,rate={load.request_rate}"
        if load.request_rate
        else f"kind=concurrent,streams={load.concurrency}"
    )
    return [
        str(binaries / "guidellm"), "run",
        "--backend", f"kind=openai_http,target={load.base_url},model={load.model}",
        "--profile", pace,
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,{data}",
        "--seed", f"kind=static,value={load.seed}",
        "--output", f"kind=json,path={RESULT}", "--disable-progress",
    ]  # fmt: skip


def _guidellm_figures(folder: Path) -> Figures:
    benchmark = json.loads((folder / RESULT).read_text())["benchmarks"][0]
    metrics, requests = benchmark["metrics"], benchmark["requests"]
    totals = metrics["request_totals"]
    lost = [one["info"] for kind in ("errored", "incomplete") for one in requests[kind]]

    def of(name: str, statistic: str = "mean") -> float:
        return float(metrics[name]["successful"][statistic])

    return Figures(
        completed=totals["successful"],
        failed=totals["total"] - totals["successful"],
        input_len=of("prompt_token_count"),
        output_len=of("output_token_count"),
        requests_per_s=of("requests_per_second"),
        output_tokens_per_s=of("output_tokens_per_second"),
        mean_ttft_ms=of("time_to_first_token_ms"),
        mean_tpot_ms=of("inter_token_latency_ms"),
        median_ttft_ms=of("time_to_first_token_ms", "median"),
        median_tpot_ms=of("inter_token_latency_ms", "median"),
        failures=json.dumps(lost) if lost else "",
    )


def _aiperf_command(load: Load, binaries: Path) -> list[str]:
    """Tokens as the server counts them; by its own tokenizer's count, ITL is of other tokens.

    One worker and one record processor: more of its processes only take CPU from the server.
    """
    pace = (
        ["--request-rate", str(load.request_rate), "--arrival-pattern", "poisson"]
        if load.request_rate
        else ["--concurrency", str(load.concurrency)]
    )
    return [
        str(binaries / "aiperf"), "profile", "--url", load.base_url, "-m", load.model,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER,
        "--use-server-token-count", "--extra-inputs", "ignore_eos:true",
        *pace, "--request-count", str(load.requests),
        "--warmup-request-count", str(load.concurrency),
        "--isl", str(load.input_len), "--isl-stddev", "0", "--osl", str(load.output_len),
        "--random-seed", str(load.seed), "--workers-max", "1", "--record-processors", "1",
        "--no-gpu-telemetry", "--ui", "none", "--artifact-dir", ".",
    ]  # fmt: skip


def _aiperf_figures(folder: Path) -> Figures:
    result: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    completed = int(result["request_count"]["avg"])
    failed = int((result.get("error_request_count") or {}).get("avg") or 0)
    return Figures(
        completed=completed,
        failed=failed,
        input_len=result["usage_prompt_tokens"]["avg"],
        output_len=result["output_sequence_length"]["avg"],
        requests_per_s=result["request_throughput"]["avg"],
        output_tokens_per_s=result["output_token_throughput"]["avg"],
        mean_ttft_ms=result["time_to_first_token"]["avg"],
        mean_tpot_ms=result["inter_token_latency"]["avg"],
        median_ttft_ms=result["time_to_first_token"]["p50"],
        median_tpot_ms=result["inter_token_latency"]["p50"],
    )


def _write_prompts(load: Load, folder: Path) -> None:
    """The prompts of ``penstock bench serve``, one JSON string a line."""
    shape = RandomShape(load.words, load.output_len)
    made = random_prompts(load.requests, shape, load.seed, vocab_size=256, as_text=True)
    lines = b"".join(bytes(prompt.content) + b"\n" for prompt in made)
    (folder / "prompts.jsonl").write_bytes(lines)


def _openai_command(load: Load, binaries: Path) -> list[str]:
    script = Path(__file__).with_name("openai_sdk.py").resolve()
    rate = ["--request-rate", str(load.request_rate)] if load.request_rate else []
    return [
        str(binaries / "python"), str(script), "--base-url", load.base_url, "--model", load.model,
        "--prompts", "prompts.jsonl", "--concurrency", str(load.concurrency),
        *rate, "--seed", str(load.seed),
        "--output-len", str(load.output_len), "--output", RESULT,
    ]  # fmt: skip


OURS = Tool("penstock bench serve", "", _our_command, _nothing, _our_figures)
FOREIGN = {
    "guidellm": Tool("guidellm", "guidellm", _guidellm_command, _nothing, _guidellm_figures),
    "aiperf": Tool("aiperf", "aiperf", _aiperf_command, _nothing, _aiperf_figures),
    "openai": Tool("OpenAI SDK script", "openai", _openai_command, _write_prompts, _our_figures),
}
