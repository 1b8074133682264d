"""The flags of ``penstock bench serve``. Names are vLLM's where they mean the same."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec

from penstock.loadtest.client.api_key import KEY_HELP
from penstock.loadtest.client.arrivals import Ramp, arrival_times, burst_times, ramp_times
from penstock.loadtest.client.load_flags import (
    RATE,
    arrival_flags,
    check_load,
    session_flags,
    trace_flags,
)
from penstock.loadtest.client.target import READY_HELP
from penstock.loadtest.options import (
    Since,
    extra_body,
    goodput_limits,
    header,
    integer,
    metadata,
    metric_names,
    number,
    percentile_list,
)
from penstock.protocol.config.flags import FlagParser

SAMPLING_FLAGS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
"""Sent in the body when given; a server that does not know one says so itself."""
DEFAULT_OUTPUT_LEN = 128
DATASETS = ("random", "sharegpt", "jsonl", "conversation", "agent", "trace")
OF_FILES = ("sharegpt", "jsonl", "trace")


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked flags of one run."""

    base_url: str
    other_urls: list[str]
    """Servers that get the same load."""
    endpoint: str
    model: str | None
    api_key: str | None
    header: list[tuple[str, str]]
    dataset_name: Literal["random", "sharegpt", "jsonl", "conversation", "agent", "trace"]
    dataset_path: str
    tokenizer: str | None
    random_input_len: int
    random_output_len: int | None
    random_range_ratio: float
    random_prefix_len: int
    random_prefix_count: int
    random_format: Literal["auto", "tokens", "text"]
    vocab_size: int
    output_len: int | None
    turns: tuple[int, int]
    """Least and most requests of a conversation."""
    think_time: float
    agent_prefix_hits: float
    agent_input_ratio: float
    trace_speed: float
    trace_block_size: int
    num_prompts: int
    max_concurrency: int | None
    request_rate: float
    burstiness: float
    ramp_up_strategy: Ramp | None
    ramp_up_start_rps: float | None
    ramp_up_end_rps: float | None
    burst_size: int | None
    burst_interval: float
    max_seconds: float | None
    client_processes: int
    sweep_concurrency: list[int]
    sweep_rate: list[float]
    seed: int
    level: int = 0
    """Which run of a sweep: each has other prompts."""
    warmup_requests: int
    ready_timeout: float | None
    request_timeout: float
    sampling: dict[str, Any]
    """What goes into each body beside the prompt."""
    goodput: dict[str, float]
    latency_from: Since
    percentile_metrics: list[str]
    metric_percentiles: list[float]
    save_result: str | None
    """File name; empty: one is made up; ``None``: nothing is saved."""
    result_dir: str
    save_detailed: bool
    report: str | None
    """File of the HTML page; empty: one is made up; ``None``: none is written."""
    metadata: dict[str, str]
    quiet: bool

    @property
    def prompt_seed(self) -> int | str:
        return f"{self.seed} level {self.level}" if self.level else self.seed

    @property
    def open_loop(self) -> bool:
        """Whether requests come at times of their own, and wait for no answer to another."""
        return (
            math.isfinite(self.request_rate)
            or self.ramp_up_strategy is not None
            or self.burst_size is not None
            or self.dataset_name == "trace"
        )

    def arrivals(self, count: int) -> list[float]:
        """Seconds from the start to each of ``count`` sessions."""
        shape, seed = self.burstiness, self.prompt_seed
        first, last = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is not None and first is not None and last is not None:
            return ramp_times(count, first, last, self.ramp_up_strategy, shape, seed)
        if self.burst_size is not None:
            size, interval = self.burst_size, self.burst_interval
            return burst_times(count, size, interval, self.request_rate, shape, seed)
        return arrival_times(count, self.request_rate, shape, seed)

    def levels(self) -> list[ServeOptions]:
        """The runs of a sweep, or the only run."""
        swept: list[dict[str, Any]] = [{"max_concurrency": n} for n in self.sweep_concurrency]
        swept += [{"request_rate": rate} for rate in self.sweep_rate]
        return [
            msgspec.structs.replace(self, level=number, **level)
            for number, level in enumerate(swept or [{}])
        ]


def _target_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--base-url",
        nargs="+",
        metavar="URL",
        help="http(s)://HOST:PORT, in place of the next two; several get the same load in turn",
    )
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=integer(1, 65535), default=8000, help="(default: 8000)")
    group.add_argument(
        "--endpoint",
        default="/v1/completions",
        help="/v1/completions (default) or /v1/chat/completions",
    )
    group.add_argument("--model", help="name in the requests (default: the server's first)")
    group.add_argument("--api-key", metavar="KEY", help=KEY_HELP)
    group.add_argument(
        "--header", type=header, nargs="+", action="extend", default=[], metavar="NAME=VALUE"
    )
    group.add_argument(
        "--ready-timeout",
        "--ready-check-timeout-sec",
        type=number(0, 86_400),
        metavar="SECONDS",
        help=READY_HELP,
    )
    group.add_argument(
        "--request-timeout",
        type=number(0.001, 86_400),
        default=600.0,
        metavar="SECONDS",
        help="a request that takes longer has failed (default: 600)",
    )


def _prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is asked")
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument(
        "--dataset-path",
        default="",
        metavar="FILE",
        help=f"of {', '.join(OF_FILES)}; of a conversation instead of one at random",
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json that counts the tokens of sharegpt (default: 4 characters each)",
    )
    _random_flags(group)
    group.add_argument(
        "--output-len",
        type=integer(1, 2**31 - 1),
        metavar="N",
        help="tokens to ask for, with any dataset",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    for name, kind in SAMPLING_FLAGS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X")
    group.add_argument(
        "--extra-body",
        type=extra_body,
        default={},
        metavar="JSON",
        help="object added to each body; null takes a member out",
    )


def _random_flags(group: argparse._ArgumentGroup) -> None:
    length = integer(1, 2**31 - 1)
    group.add_argument("--random-input-len", type=length, default=1024, metavar="N")
    group.add_argument("--random-output-len", type=length, metavar="N", help="(default: 128)")
    group.add_argument(
        "--random-range-ratio",
        type=number(0, 1, below=True),
        default=0.0,
        metavar="R",
        help="lengths from N * (1 - R) to N * (1 + R) (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=integer(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="common tokens before each prompt's own (default: 0)",
    )
    group.add_argument(
        "--random-prefix-count",
        type=integer(1, 1_000_000),
        default=1,
        metavar="N",
        help="different prefixes, taken in turn (default: 1)",
    )
    group.add_argument(
        "--random-format",
        choices=["auto", "tokens", "text"],
        default="auto",
        help="token ids or words; auto: words for chat",
    )
    group.add_argument(
        "--vocab-size",
        type=integer(1, 2**31 - 1),
        default=256,
        help="random token ids are below it (default: 256, which every vocabulary has)",
    )


def _load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how much of it")
    group.add_argument(
        "--num-prompts",
        type=integer(1, 10_000_000),
        metavar="N",
        help="(default: 1000, of a trace all)",
    )
    group.add_argument(
        "--max-concurrency", type=integer(1, 1_000_000), metavar="N", help="open at the same time"
    )
    group.add_argument(
        "--request-rate",
        type=RATE,
        default=math.inf,
        metavar="R",
        help="arrivals a second, at random (default: inf, all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=number(0, 1e6, above=True),
        default=1.0,
        metavar="B",
        help="shape of the gaps: 1 Poisson, less bursty, more regular (default: 1)",
    )
    arrival_flags(group)
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    group.add_argument(
        "--warmup-requests",
        "--num-warmups",
        type=integer(0, 1_000_000),
        default=1,
        metavar="N",
        help="sent before and not measured; of other random prompts (default: 1)",
    )


def _result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes out")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep these limits: ttft, tpot, itl, e2el",
    )
    group.add_argument(
        "--latency-from",
        choices=get_args(Since),
        default="intended",
        help="when TTFT and E2EL begin: when a request was to be sent, or when it was",
    )
    group.add_argument(
        "--percentile-metrics",
        type=metric_names,
        default=["ttft", "tpot", "itl", "e2el", "queue"],
        metavar="NAMES",
        help="(default: ttft,tpot,itl,e2el,queue)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=percentile_list,
        default=[50.0, 90.0, 95.0, 99.0],
        metavar="LIST",
        help="(default: 50,90,95,99)",
    )
    group.add_argument(
        "--save-result",
        nargs="?",
        const="",
        metavar="FILE",
        help="write JSON; made-up name if none",
    )
    group.add_argument("--result-dir", default="", metavar="FOLDER", help="where that goes")
    group.add_argument("--save-detailed", action="store_true", help="each request in it too")
    group.add_argument(
        "--report", nargs="?", const="", metavar="FILE", help="write an HTML page with plots"
    )
    group.add_argument(
        "--metadata", type=metadata, nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    group.add_argument(
        "--quiet", "--disable-tqdm", action="store_true", help="no progress on the terminal"
    )


def parser() -> argparse.ArgumentParser:
    found = FlagParser(
        "penstock bench serve",
        usage="penstock bench serve [flags]",
        description="Put load on an OpenAI-compatible server and measure its answers.",
        allow_abbrev=False,
    )
    _target_flags(found)
    _prompt_flags(found)
    session_flags(found)
    trace_flags(found)
    _load_flags(found)
    _result_flags(found)
    return found


def parse(arguments: Sequence[str]) -> ServeOptions:
    """Read the flags. Wrong ones end the process with code 2, as argparse does."""
    reader = parser()
    found = vars(reader.parse_args(arguments))
    host = found.pop("host")
    host = f"[{host}]" if ":" in host else host
    port = found.pop("port")
    found["base_url"], *found["other_urls"] = found["base_url"] or [f"http://{host}:{port}"]
    check_load(found, reader.error)
    try:
        found["goodput"] = goodput_limits(found["goodput"])
    except ValueError as error:
        reader.error(str(error))
    if not found["endpoint"].startswith("/"):
        reader.error(f"--endpoint {found['endpoint']}: it must begin with /")
    if found["dataset_name"] in OF_FILES and not found["dataset_path"]:
        reader.error(f"--dataset-name {found['dataset_name']} needs --dataset-path")
    sampling: dict[str, Any] = {name: found.pop(name) for name in SAMPLING_FLAGS}
    sampling["ignore_eos"] = True if found.pop("ignore_eos") else None
    sampling = {name: value for name, value in sampling.items() if value is not None}
    found["sampling"] = sampling | found.pop("extra_body")
    found["metadata"] = dict(found["metadata"])
    if found["result_dir"] and found["save_result"] is None:
        found["save_result"] = ""
    return ServeOptions(**found)
