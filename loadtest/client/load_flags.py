"""The flags of ``penstock bench serve`` that shape a load: arrivals, conversations, traces."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from penstock.loadtest.client.arrivals import Ramp
from penstock.loadtest.options import integer, length_range, number

RATE = number(0, math.inf, above=True)
FINITE_RATE = number(0, 1e9, above=True)
SECONDS = number(0, 864_000, above=True)
WHOLE_TRACE = 10_000_000
"""More requests than ``--num-prompts`` may ask for."""
DEFAULT_NUM_PROMPTS = 1000
AGENT_TURNS = (33, 33)
DEFAULT_TURNS = (4, 4)


def session_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations (--dataset-name conversation or agent)")
    group.add_argument(
        "--turns",
        type=length_range,
        metavar="N",
        help="requests of each, or LOW:HIGH (default: 4, of agents 33); --num-prompts counts "
        "conversations",
    )
    group.add_argument(
        "--think-time",
        type=number(0, 86_400),
        default=0.0,
        metavar="SECONDS",
        help="between an answer and the next turn (default: 0)",
    )
    group.add_argument(
        "--agent-prefix-hits",
        type=number(0, 1, above=True, below=True),
        default=0.94,
        metavar="SHARE",
        help="prompt tokens that an earlier prompt of the session had (default: 0.94)",
    )
    group.add_argument(
        "--agent-input-ratio",
        type=number(1, 1e6),
        default=131.0,
        metavar="R",
        help="tokens read for one that is written (default: 131)",
    )


def trace_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traces (--dataset-name trace)")
    group.add_argument(
        "--trace-speed",
        type=FINITE_RATE,
        default=1.0,
        metavar="X",
        help="seconds of the trace in one (default: 1)",
    )
    group.add_argument(
        "--trace-block-size",
        type=integer(1, 1_000_000),
        default=512,
        metavar="N",
        help="tokens of one of its hash_ids (default: 512)",
    )


def arrival_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ramp-up-strategy",
        choices=get_args(Ramp),
        help="let the rate go from one to the other of the next two, with the time",
    )
    group.add_argument("--ramp-up-start-rps", type=FINITE_RATE, metavar="R")
    group.add_argument("--ramp-up-end-rps", type=FINITE_RATE, metavar="R")
    group.add_argument(
        "--burst-size",
        type=integer(1, 1_000_000),
        metavar="N",
        help="so many at once each --burst-interval, and --request-rate between them",
    )
    group.add_argument(
        "--burst-interval", type=SECONDS, default=10.0, metavar="SECONDS", help="(default: 10)"
    )
    group.add_argument(
        "--max-seconds", type=SECONDS, metavar="SECONDS", help="send nothing new after that"
    )
    group.add_argument(
        "--client-processes",
        type=integer(1, 256),
        default=1,
        metavar="N",
        help="send from so many processes (default: 1)",
    )
    group.add_argument(
        "--sweep-concurrency",
        type=integer(1, 1_000_000),
        nargs="+",
        default=[],
        metavar="N",
        help="one run for each --max-concurrency",
    )
    group.add_argument(
        "--sweep-rate",
        type=RATE,
        nargs="+",
        default=[],
        metavar="R",
        help="one run for each --request-rate",
    )


def check_load(found: dict[str, Any], error: Callable[[str], Any]) -> None:
    """Refuse flags that contradict each other, with ``error``; fill in what depends on others."""
    if found["sweep_concurrency"] and found["sweep_rate"]:
        error("--sweep-concurrency and --sweep-rate: give one of them")
    if found["sweep_concurrency"] and found["max_concurrency"] is not None:
        error("--sweep-concurrency takes the place of --max-concurrency")
    if found["sweep_rate"] and math.isfinite(found["request_rate"]):
        error("--sweep-rate takes the place of --request-rate")
    _check_ramp(found, error)
    if found["dataset_name"] == "trace":
        for flag in _arrivals_given(found):
            error(f"--dataset-name trace has times of its own; leave {flag} out")
    if (found["max_concurrency"] or WHOLE_TRACE) < found["client_processes"]:
        error("--client-processes: each needs one of --max-concurrency at least")
    agent = found["dataset_name"] == "agent"
    if found["turns"] and found["dataset_name"] == "conversation" and found["dataset_path"]:
        error("--turns: the file of --dataset-path says how many there are")
    found["turns"] = found["turns"] or (AGENT_TURNS if agent else DEFAULT_TURNS)
    if agent and (found["turns"][0] != found["turns"][1] or found["turns"][0] < 2):
        error("--turns: agents have one number of turns, 2 or more")
    if found["num_prompts"] is None:
        whole = found["dataset_name"] == "trace"
        found["num_prompts"] = WHOLE_TRACE if whole else DEFAULT_NUM_PROMPTS


def _check_ramp(found: Mapping[str, Any], error: Callable[[str], Any]) -> None:
    ends = [found["ramp_up_start_rps"], found["ramp_up_end_rps"]]
    if found["ramp_up_strategy"] is None:
        if ends != [None, None]:
            error("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return
    if None in ends:
        error("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if math.isfinite(found["request_rate"]) or found["sweep_rate"] or found["burst_size"]:
        error("--ramp-up-strategy: leave --request-rate, --sweep-rate and --burst-size out")


def _arrivals_given(found: Mapping[str, Any]) -> list[str]:
    given = {
        "--request-rate": math.isfinite(found["request_rate"]),
        "--sweep-rate": bool(found["sweep_rate"]),
        "--ramp-up-strategy": found["ramp_up_strategy"] is not None,
        "--burst-size": found["burst_size"] is not None,
    }
    return [flag for flag, is_given in given.items() if is_given]
