"""Run foreign load tools and ``penstock bench serve`` in turn on one server, and compare.

    python -m penstock.loadtest.studies.foreign.compare --base-url http://127.0.0.1:8000 \\
        --tokenizer MODEL_FOLDER --guidellm ENVIRONMENT --aiperf ENVIRONMENT --openai ENVIRONMENT

Each foreign run lies between two of ours and is compared with their mean, so that what else the
machine does meets both; the ratio that counts is the median over the rounds. README.md beside
this file says how the environments are made. Exit codes: 0, 1 when a run failed or a ratio is
further from 1 than ``--within``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from penstock.loadtest.client.prompts import WORDS
from penstock.loadtest.studies.foreign.tools import (
    FOREIGN,
    OURS,
    Figures,
    Load,
    Tool,
    offline_cache,
)

COMPARED = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "mean_ttft_ms": "mean TTFT ms",
    "mean_tpot_ms": "mean TPOT ms",
}
PACED = ("mean_ttft_ms", "mean_tpot_ms")
"""Those that count at random arrivals: the rates are then each tool's own draws."""
RUN_SECONDS = 600.0
TAIL = 3000
"""Characters of a failed tool's output that are shown."""


class ToolFailed(Exception):
    """A tool ended with an error, wrote no usable result, or lost requests."""


class Run(msgspec.Struct, frozen=True):
    """One run, and what its processes took, starting up included."""

    figures: Figures
    cpu_seconds: float


class Pair(msgspec.Struct, frozen=True):
    """A foreign run and the two of ours around it."""

    tool: str
    foreign: Run
    before: Run
    after: Run

    def ours(self, name: str) -> float:
        values = (getattr(run.figures, name) for run in (self.before, self.after))
        return statistics.fmean(values)

    def ratio(self, name: str) -> float:
        return float(getattr(self.foreign.figures, name)) / self.ours(name)


def words_for(tokenizer: Path, tokens: int) -> int:
    """How many of the words of our random prompts make about ``tokens`` tokens."""
    text = " ".join(WORDS)
    encoded = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text)
    return max(1, round(tokens * len(WORDS) / len(encoded.ids)))


def run_tool(tool: Tool, load: Load, binaries: Path, cache: Path) -> Run:
    """Run a tool in a new folder of its own. Raises ``ToolFailed``.

    ``binaries`` holds the executables of its environment; ``cache`` is what ``offline_cache`` made.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(cache),
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
    }
    with tempfile.TemporaryDirectory(prefix="foreign-") as place:
        folder = Path(place)
        tool.prepare(load, folder)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(
                tool.command(load, binaries), cwd=folder, env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolFailed(f"{tool.name}: {error}") from None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            figures = tool.read(folder)
        except (OSError, KeyError, TypeError, ValueError) as error:
            why = f"no usable result ({error!r}), exit code {done.returncode}"
            raise ToolFailed(f"{tool.name}: {why}:\n{done.stdout[-TAIL:]}") from None
    if done.returncode or figures.failed or figures.completed != load.requests:
        counts = f"{figures.completed} of {load.requests} completed, {figures.failed} failed"
        words = figures.failures[:TAIL] or done.stdout[-TAIL:]
        raise ToolFailed(f"{tool.name}: {counts}, exit code {done.returncode}:\n{words}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(figures, round(cpu, 2))


def compare(
    load: Load, tools: Mapping[str, Path], tokenizer: Path, rounds: int
) -> dict[str, list[Pair]]:
    """All rounds. ``tools`` has the environment's folder of each. Raises ``ToolFailed``."""
    pairs: dict[str, list[Pair]] = {name: [] for name in tools}
    seed = load.seed
    with tempfile.TemporaryDirectory(prefix="hub-") as place:
        cache = offline_cache(Path(place), tokenizer)

        def run(tool: Tool, binaries: Path) -> Run:
            nonlocal seed
            seed += 1
            done = run_tool(tool, msgspec.structs.replace(load, seed=seed), binaries, cache)
            line = {"tool": tool.name, **msgspec.to_builtins(done)}
            print(json.dumps(line), file=sys.stderr, flush=True)
            return done

        before = run(OURS, Path())
        for _ in range(rounds):
            for name, environment in tools.items():
                foreign = run(FOREIGN[name], environment / "bin")
                after = run(OURS, Path())
                pairs[name].append(Pair(name, foreign, before, after))
                before = after
    return pairs


def version(environment: Path, package: str) -> str:
    """The version of a package in an environment. Raises ``ToolFailed``."""
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    try:
        found = subprocess.run(
            [str(environment / "bin" / "python"), "-c", code, package],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolFailed(f"{environment} has no {package}: {error}") from None
    return found.stdout.strip()


def median_ratio(pairs: Sequence[Pair], name: str) -> float:
    return statistics.median(pair.ratio(name) for pair in pairs)


def outside(
    pairs: Mapping[str, Sequence[Pair]], within: float, names: Iterable[str] = COMPARED
) -> list[str]:
    """The figures of tools that differ by more than the share ``within``, in words."""
    return [
        f"{tool}: {COMPARED[name]} is {median_ratio(some, name):.2f} of ours"
        for tool, some in pairs.items()
        for name in names
        if abs(median_ratio(some, name) - 1) > within
    ]


def table(pairs: Mapping[str, Sequence[Pair]], versions: Mapping[str, str]) -> str:
    """Markdown: medians over the rounds; each cell is theirs / ours (median ratio)."""
    heads = ["tool", *COMPARED.values(), "CPU s, theirs / ours"]
    lines = [heads, ["---"] * len(heads)]
    for tool, some in pairs.items():
        cells = [f"{FOREIGN[tool].name} {versions[tool]}"]
        for name in COMPARED:
            theirs = statistics.median(getattr(pair.foreign.figures, name) for pair in some)
            ours = statistics.median(pair.ours(name) for pair in some)
            cells.append(f"{theirs:.4g} / {ours:.4g} ({median_ratio(some, name):.2f})")
        cpu = statistics.median(pair.foreign.cpu_seconds for pair in some)
        own = statistics.median(pair.before.cpu_seconds for pair in some)
        lines.append([*cells, f"{cpu:.1f} / {own:.1f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def first_model(base_url: str) -> str:
    """The name of the first model served. Raises ``OSError``, ``ValueError`` or ``KeyError``."""
    with urllib.request.urlopen(base_url + "/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder of the served model, or its tokenizer"
    )
    for name, tool in FOREIGN.items():
        parser.add_argument(
            f"--{name}", type=Path, metavar="FOLDER", help=f"virtual environment for {tool.name}"
        )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument(
        "--request-rate", type=float, help="Poisson arrivals a second (default: a closed loop)"
    )
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=0.1, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write all runs there as JSON")
    options = parser.parse_args(arguments)
    if not (options.tokenizer / "tokenizer.json").is_file():
        parser.error(f"--tokenizer: {options.tokenizer} has no tokenizer.json")
    if not any(getattr(options, name) for name in FOREIGN):
        parser.error("name at least one environment: " + ", ".join(f"--{name}" for name in FOREIGN))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    base_url = options.base_url.rstrip("/")
    # Without resolve(): an environment's python is a link, and is one only under its own name.
    tools = {name: getattr(options, name) for name in FOREIGN}
    tools = {name: folder.absolute() for name, folder in tools.items() if folder is not None}
    try:
        versions = {name: version(folder, FOREIGN[name].package) for name, folder in tools.items()}
        load = Load(
            base_url=base_url,
            model=first_model(base_url),
            words=words_for(options.tokenizer, options.input_len),
            requests=options.requests,
            concurrency=options.concurrency,
            request_rate=options.request_rate,
            input_len=options.input_len,
            output_len=options.output_len,
            seed=options.seed,
        )
        pairs = compare(load, tools, options.tokenizer, options.rounds)
    except (ToolFailed, OSError, ValueError, KeyError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(table(pairs, versions))
    if options.output:
        record = {"load": load, "versions": versions, "pairs": pairs}
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    differing = outside(pairs, options.within, PACED if load.request_rate else COMPARED)
    for line in differing:
        print(line, file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
